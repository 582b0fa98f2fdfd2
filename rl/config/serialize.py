"""A resolved config as JSON, and back.

A run's `config.json` is `{"module": ..., "config": ..., "values": {...}}`: the registry
function and every field. To load it is to call the function again and set the values, so
that fields that hold code come from the function; in the file they are names, and a name
that no longer matches is an error; so is, in a sequence of components of several kinds, the
`class` that stands beside the fields of each. Numbers that JSON lacks are the strings "inf", "-inf"
and "nan"; tuples are lists, enums their names, paths strings.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl.atomic_file import replacing
from rl.config.registry import ResolvedRun, resolve
from rl.config.tree import ConfigError, Entry, children, rebuild, type_name

ConfigT = TypeVar("ConfigT")

_CLASS = "class"


def to_dict(config: Any) -> dict[str, Any]:
    """Every field of a config, nested, as JSON values.

    Raises:
        TypeError: a field that is neither plain data nor marked `metadata=HIDDEN`.
    """
    return {entry.name: _dump(entry) for entry in children(config)}


def load_values(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """A copy of `config` with the values of `to_dict`; every field must be there, and no other.

    Raises:
        ConfigError: names all unknown and missing keys, and all values of a wrong type.
    """
    loading = _Loading()
    loading.node(config, values, prefix="")
    if loading.problems:
        raise ConfigError("; ".join(loading.problems))
    return rebuild(config, loading.changes)


def write_json(run: ResolvedRun, path: Path) -> None:
    """Write a run's `config.json`, whole or not at all."""
    content = {"module": run.module, "config": run.function, "values": to_dict(run.config)}
    with replacing(path) as file:
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> ResolvedRun:
    """The run of a `config.json`.

    Raises:
        ConfigError: the file is missing, is not such a file, or does not fit its registry function.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"module", "config", "values"}:
        raise ConfigError(f"{path} is not a run's config.json: its keys must be module, config and values")
    base = resolve(str(content["module"]), str(content["config"]))
    try:
        config = load_values(base.config, content["values"])
    except ConfigError as error:
        raise ConfigError(f"{path} does not fit {base.module}.{base.function}: {error}") from error
    return dataclasses.replace(base, config=config)


def code_name(value: Any) -> Any:
    """What code is called: dotted name of a function or class, `name/flavor` of a spec; lists in order."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [code_name(item) for item in value]
    if isinstance(getattr(value, "name", None), str):
        flavor = getattr(value, "flavor", None)
        return f"{value.name}/{flavor}" if isinstance(flavor, str) else value.name
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def encode(value: Any) -> Any:
    """A plain value as strictly valid JSON; raises TypeError for one that is not plain."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__qualname__} is not plain data")


def decode(data: Any, annotation: Any) -> Any:
    """The value of type `annotation` that `encode` gave as `data`; raises ValueError for any other."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for arm in args:
            try:
                return decode(data, arm)
            except ValueError:
                continue
    elif origin is Literal:
        if any(data == choice and type(data) is type(choice) for choice in args):
            return data
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(data, list):
            return _decode_items(data, args, is_tuple=origin is tuple)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(data, dict):
            return {decode(key, args[0]): decode(item, args[1]) for key, item in data.items()}
    elif annotation is Any or (data is None and annotation in (None, type(None))):
        return data
    else:
        return _decode_scalar(data, annotation)
    raise _mismatch(data, annotation)


def _decode_items(data: list[Any], args: tuple[Any, ...], *, is_tuple: bool) -> Any:
    if not is_tuple:
        return [decode(item, args[0]) for item in data]
    types_ = (args[0],) * len(data) if args[-1] is Ellipsis else args
    if len(types_) != len(data):
        raise _mismatch(data, tuple[args])  # type: ignore[valid-type]
    return tuple(decode(item, arg) for item, arg in zip(data, types_, strict=True))


def _decode_scalar(data: Any, annotation: Any) -> Any:
    if annotation is float and not isinstance(data, bool):
        if isinstance(data, int | float) or data in ("inf", "-inf", "nan"):
            return float(data)
    elif annotation is int:
        if isinstance(data, int) and not isinstance(data, bool):
            return data
    elif annotation in (bool, str):
        if isinstance(data, annotation):
            return data
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        if data in annotation.__members__:
            return annotation[data]
    elif isinstance(annotation, type) and issubclass(annotation, Path) and isinstance(data, str):
        return annotation(data)
    raise _mismatch(data, annotation)


def _mismatch(data: Any, annotation: Any) -> ValueError:
    return ValueError(f"{data!r} is not of type {type_name(annotation)}")


def _dump(entry: Entry) -> Any:
    if entry.kind == "hidden":
        return code_name(entry.value)
    if entry.kind == "node":
        if isinstance(entry.value, list | tuple):
            return [_dump_item(child, entry) for child in children(entry.value)]
        return to_dict(entry.value)
    try:
        return encode(entry.value)
    except TypeError as error:
        raise TypeError(f"{entry.owner.__qualname__}.{entry.name}: {error}; mark code with HIDDEN") from error


def _dump_item(item: Entry, sequence: Entry) -> dict[str, Any]:
    """With its class, where the sequence's type does not say which it is; no field can have that name."""
    kind = type(item.value)
    named = {} if kind in typing.get_args(sequence.annotation) else {_CLASS: code_name(kind)}
    return named | to_dict(item.value)


@dataclass(slots=True)
class _Loading:
    """Values collected from JSON, and everything that is wrong with it."""

    changes: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def node(self, config: Any, data: Any, *, prefix: str) -> None:
        if isinstance(config, list | tuple) and isinstance(data, list):
            data = {str(i): item for i, item in enumerate(data)}
        if not isinstance(data, Mapping):
            self.problems.append(f"{prefix.rstrip('.') or 'values'} is {data!r}, not an object of fields")
            return
        if _CLASS in data:
            data = dict(data)
            if (name := data.pop(_CLASS)) != (own := code_name(type(config))):
                self.problems.append(
                    f"{prefix.rstrip('.')} was {name!r} and is {own!r} in the registry function"
                )
                return
        entries = {entry.name: entry for entry in children(config, prefix=prefix)}
        self.problems += [f"unknown key {prefix}{name}" for name in data if name not in entries]
        self.problems += [f"missing key {entry.path}" for name, entry in entries.items() if name not in data]
        for name, entry in entries.items():
            if name in data:
                self.entry(entry, data[name])

    def entry(self, entry: Entry, data: Any) -> None:
        if entry.kind in ("node", "absent") and data is None and entry.optional:
            self.changes[entry.path] = None
        elif entry.kind == "node":
            self.node(entry.value, data, prefix=f"{entry.path}.")
        elif entry.kind == "absent" and data == encode(entry.value):
            self.changes[entry.path] = entry.value
        elif entry.kind == "absent":
            absence = "None" if entry.value is None else "empty"
            self.problems.append(f"{entry.path} has fields, but is {absence} in the registry function")
        elif entry.kind == "hidden":
            if data != (name := code_name(entry.value)):
                self.problems.append(f"{entry.path} was {data!r} and is {name!r} in the registry function")
        else:
            try:
                self.changes[entry.path] = decode(data, entry.annotation)
            except ValueError as error:
                self.problems.append(f"{entry.path}: {error}")
