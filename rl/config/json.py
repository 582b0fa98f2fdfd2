"""A config as JSON and back, and the differences between two configs.

A run's `config.json` is `{"module": ..., "config": ..., "values": {...}}`: the registry function
and every field. To load it, the function is called again and the values are set, so fields that
hold code come from the function; in the file they are names, and a name that no longer matches is
an error. In a sequence of components of several kinds each element has its `class` beside its
fields. Numbers that JSON lacks are the strings "inf", "-inf" and "nan"; tuples are lists, paths
strings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl.config.registry import RunRequest, resolve
from rl.config.tree import ConfigEntry, ConfigError, convert, list_children, rebuild
from rl.utils.files import parse_json, read_json_object, replace_file

ConfigT = TypeVar("ConfigT")

_CLASS = "class"
LOCATION = ("name", "dump_folder", "overwrite")
"""Fields of a run that follow from its folder."""


def to_dict(config: Any) -> dict[str, Any]:
    """Return every field of a config, nested, as JSON values; raises TypeError for code that is not
    HIDDEN.
    """
    return {entry.name: _dump(entry) for entry in list_children(config)}


def load_values(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """Return a copy of `config` with the values of `to_dict`; raises ConfigError with all wrong
    keys and values.
    """
    changes: dict[str, Any] = {}
    problems: list[str] = []
    _collect(config, values, prefix="", changes=changes, problems=problems)
    if problems:
        raise ConfigError("; ".join(problems))
    return rebuild(config, changes)


def write_json(request: RunRequest, path: Path) -> None:
    """Write a run's `config.json` atomically."""
    _write(
        {"module": request.module, "config": request.function, "values": to_dict(request.config)},
        path,
    )


def write_defaults(request: RunRequest, path: Path) -> None:
    """Write the values of the registry function's config atomically, for readers that may not call
    the function.
    """
    _write(to_dict(request.defaults), path)


def _write(content: Mapping[str, Any], path: Path) -> None:
    # NaN is no JSON (allow_nan): a file with it could be read by Python alone.
    with replace_file(path) as file:
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, *, before: Callable[[str], None] | None = None) -> RunRequest:
    """Import the module of a `config.json`, call its registry function, and return the run.

    Args:
        before: called before the module is imported, with a sentence that names it.

    Raises:
        ConfigError: the file does not fit its registry function.
    """
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"module", "config", "values"}:
        raise ConfigError(
            f"{path} is not a run's config.json: its keys must be module, config and values"
        )
    # To read a config of somebody else is to run their code, so that it is announced.
    module, function = str(content["module"]), str(content["config"])
    if before is not None:
        before(f"{path} runs code: {function}() of the module {module}")
    base = resolve(module, function)
    try:
        config = load_values(base.config, content["values"])
    except ConfigError as error:
        raise ConfigError(f"{path} does not fit {base.module}.{base.function}: {error}") from error
    return dataclasses.replace(base, config=config)


def find_differences(
    values: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return value before and now of each leaf that differs between two results of `to_dict`; None
    if missing.
    """
    ours, theirs = dict(walk_leaves(values)), dict(walk_leaves(before))
    changes: dict[str, tuple[Any, Any]] = {}
    for path in {**theirs, **ours}:
        # As text, since True and 1.0 equal 1.
        if json.dumps(ours.get(path)) != json.dumps(theirs.get(path)):
            changes[path] = (theirs.get(path), ours.get(path))
    return changes


def list_changed_fields(file: Path, config: Any) -> list[str]:
    """Return a line for each field that differs from a config.json, except `LOCATION`:
    `loop.num_steps: 80 -> 160`.
    """
    changes = find_differences(to_dict(config), read_json_object(file)["values"])
    for path in LOCATION:
        changes.pop(path, None)
    return [
        f"{path}: {json.dumps(before)} -> {json.dumps(value)}"
        for path, (before, value) in changes.items()
    ]


def walk_leaves(value: Any, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every leaf of `to_dict`'s result; a list is one leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from walk_leaves(inner, prefix=f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value


def get_value_at(values: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of `to_dict`'s result at a dotted path, or the default if there is none."""
    value: Any = values
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def name_code(value: Any) -> Any:
    """Return the dotted name of a function or class, or `name/flavor` of a spec; lists in order."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return list(map(name_code, value))
    if isinstance(getattr(value, "name", None), str):
        flavor = getattr(value, "flavor", None)
        return f"{value.name}/{flavor}" if isinstance(flavor, str) else value.name
    # A function or class has its own name; of an instance it is the class's.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def encode(value: Any) -> Any:
    """Return a plain value as strictly valid JSON; raise TypeError for any other value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return list(map(encode, value))
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__qualname__} is not plain data")


def _dump(entry: ConfigEntry) -> Any:
    if entry.kind == "hidden":
        return name_code(entry.value)
    if entry.kind == "node" and isinstance(entry.value, list | tuple):
        return [_dump_item(item, known=typing.get_args(entry.annotation)) for item in entry.value]
    if entry.kind == "node":
        return to_dict(entry.value)
    try:
        return encode(entry.value)
    except TypeError as error:
        raise TypeError(
            f"{entry.owner.__qualname__}.{entry.name}: {error}; mark code with HIDDEN"
        ) from error


def _dump_item(item: Any, *, known: Sequence[Any]) -> dict[str, Any]:
    """Return an element of a sequence with its class, unless the sequence's type says which."""
    if type(item) in known:
        return to_dict(item)
    return {_CLASS: name_code(type(item)), **to_dict(item)}


def _collect(
    config: Any, data: Any, *, prefix: str, changes: dict[str, Any], problems: list[str]
) -> None:
    """Add the values of a node's fields to `changes` by path, and all errors to `problems`."""
    path = prefix.rstrip(".")
    if isinstance(config, list | tuple) and isinstance(data, list):
        data = {str(i): item for i, item in enumerate(data)}
    if not isinstance(data, Mapping):
        problems.append(f"{path or 'values'} is {data!r}, not an object of fields")
        return
    # Values of one class must not be set into another one, whose fields may have the same names.
    own = name_code(type(config))
    if data.get(_CLASS, own) != own:
        problems.append(f"{path} was {data[_CLASS]!r} and is {own!r} in the registry function")
        return

    entries = {entry.name: entry for entry in list_children(config, prefix=prefix)}
    problems += [f"unknown key {prefix}{name}" for name in data if name not in (*entries, _CLASS)]
    for name, entry in entries.items():
        if name in data:
            _collect_field(entry, data[name], changes=changes, problems=problems)
        else:
            problems.append(f"missing key {entry.path}")


def _collect_field(
    entry: ConfigEntry, value: Any, *, changes: dict[str, Any], problems: list[str]
) -> None:
    """Add the value of one field, or the errors of all fields below it."""
    if entry.kind in ("node", "absent") and value is None and entry.optional:
        changes[entry.path] = None
    elif entry.kind == "node":
        _collect(entry.value, value, prefix=f"{entry.path}.", changes=changes, problems=problems)
    elif entry.kind == "absent":
        # Without the component there is no class that the fields could belong to.
        if value != encode(entry.value):
            problems.append(
                f"{entry.path} has fields, but is {entry.absence} in the registry function"
            )
    elif entry.kind == "hidden":
        # Code comes from the function; its name in the file only tells that it is the same.
        own = name_code(entry.value)
        if value != own:
            problems.append(f"{entry.path} was {value!r} and is {own!r} in the registry function")
    else:
        try:
            changes[entry.path] = convert(value, entry.annotation, from_json=True)
        except ValueError as error:
            problems.append(f"{entry.path}: {error}")
