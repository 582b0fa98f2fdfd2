"""A config seen as a tree: each field with its path, type and docstring, and a copy with some replaced.

The command line and the JSON file are both written over this walk, so they agree on what a
config holds. Nodes are dataclasses (a `Configurable.Config`, a loss's settings) and non-empty
lists or tuples of them, whose elements are named by index; everything else is a leaf.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl.config.plain_types import is_of_type

NodeT = TypeVar("NodeT")


class ConfigError(ValueError):
    """What a user got wrong in a configuration; its text is the whole message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One field of a config."""

    path: str
    """Dotted, from the root."""
    kind: Literal["leaf", "node", "absent", "hidden"]
    """`absent` is an optional node that is None or an empty sequence of nodes; `hidden` holds code."""
    value: Any
    annotation: Any
    """The field's type; of a hidden entry None."""
    owner: type
    """The dataclass that has the field, or the sequence that has the element."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def optional(self) -> bool:
        """Whether None is a value of it."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def doc(self) -> str:
        """The field's docstring."""
        return field_docs(self.owner).get(self.name, "")


def children(node: Any, *, prefix: str = "") -> list[Entry]:
    """The fields of one node, in the order of their definition.

    Raises:
        TypeError: a field that is not hidden holds code, or its type cannot be resolved.
    """
    if isinstance(node, list | tuple):
        return [
            Entry(path=f"{prefix}{i}", kind="node", value=item, annotation=type(item), owner=type(node))
            for i, item in enumerate(node)
        ]
    fields = [f for f in dataclasses.fields(node) if f.init]
    return [_entry(type(node), f, getattr(node, f.name), path=prefix + f.name) for f in fields]


def walk(node: Any, *, prefix: str = "") -> Iterator[Entry]:
    """Every entry below `node`, depth first; a node comes before its fields."""
    for entry in children(node, prefix=prefix):
        yield entry
        if entry.kind == "node":
            yield from walk(entry.value, prefix=f"{entry.path}.")


def input_paths(config: Any) -> dict[str, Path]:
    """The files and folders that fields of the config name and that are there, by the field's path."""
    paths = {
        entry.path: Path(entry.value)
        for entry in walk(config)
        if entry.kind == "leaf" and isinstance(entry.value, str | Path) and str(entry.value)
    }
    return {field: path for field, path in paths.items() if _exists(path.expanduser())}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text that could be no file's name
        return False


def rebuild(node: NodeT, changes: Mapping[str, Any] | None = None, *, prefix: str = "") -> NodeT:
    """A copy with the values of `changes`, by path; every `__post_init__` runs on the result.

    Raises:
        ConfigError: a value is not of its field's type, or a `__post_init__` refused the values; the message
            starts with the node's path.
        TypeError: a `__post_init__` rewrote a field (it may only validate).
    """
    changes = changes or {}
    values: dict[str, Any] = {}
    for entry in children(node, prefix=prefix):
        if entry.path in changes:
            values[entry.name] = changes[entry.path]
        elif entry.kind == "node":
            values[entry.name] = rebuild(entry.value, changes, prefix=f"{entry.path}.")
        else:
            values[entry.name] = entry.value
    cls: Any = type(node)
    if isinstance(node, list | tuple):
        return cls(values.values())
    with _at(prefix):
        _check_types(cls, values)
        built = cls(**values)
    for name, value in values.items():
        if getattr(built, name) is not value:
            raise TypeError(f"{cls.__qualname__}.__post_init__ rewrites {name!r}; it may only validate")
    return built


def with_value(node: NodeT, path: str, value: Any, *, prefix: str = "") -> NodeT:
    """As `rebuild` with one change, of a node that is valid as it is: only what holds the field is made anew.

    Raises:
        ConfigError: as `rebuild`.
    """
    name, _, rest = path.partition(".")
    cls: Any = type(node)
    if isinstance(node, list | tuple):
        items = list(node)
        items[int(name)] = with_value(items[int(name)], rest, value, prefix=f"{prefix}{name}.")
        return cls(items)
    values = {f.name: getattr(node, f.name) for f in dataclasses.fields(cls) if f.init}
    values[name] = with_value(values[name], rest, value, prefix=f"{prefix}{name}.") if rest else value
    with _at(prefix):
        _check_types(cls, {name: values[name]})
        return cls(**values)


def check_fields(node: Any, *, prefix: str = "") -> None:
    """Check a config again, fields of which may have been edited since its construction.

    Raises:
        ConfigError: as `rebuild`.
    """
    if isinstance(node, list | tuple):
        for i, item in enumerate(node):
            check_fields(item, prefix=f"{prefix}{i}.")
        return
    values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if f.init}
    for f in dataclasses.fields(node):
        if f.init and not f.metadata.get("hidden") and is_node(values[f.name]):
            check_fields(values[f.name], prefix=f"{prefix}{f.name}.")
    with _at(prefix):
        _check_types(type(node), values)
        if hasattr(node, "__post_init__"):
            node.__post_init__()


def _check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of a node's values that is not of its field's type."""
    for f in dataclasses.fields(cls):
        if f.name not in values or f.metadata.get("hidden") or is_node(values[f.name]):
            continue
        value, annotation = values[f.name], _annotation(cls, f.name)
        if annotation is not None and not is_of_type(value, annotation):
            raise ValueError(f"{f.name}={value!r}: must be {type_name(annotation)}")


@contextlib.contextmanager
def _at(prefix: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(_placed(str(error), path=prefix.rstrip("."))) from error


def _placed(message: str, *, path: str) -> str:
    """A node's complaint with its path: "lr < 0" and "optimizer.lr < 0" of `trainer.optimizer`."""
    parent, dot, name = path.rpartition(".")
    if name and message.startswith(f"{name}."):
        return f"{parent}{dot}{message}"
    return f"{path}: {message}" if path else message


def type_name(annotation: Any) -> str:
    """A type as a user reads it: `float | None`, `'linear' | 'cosine'`, `tuple[int, ...]`."""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(repr(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arm) for arm in args)
    name = getattr(origin or annotation, "__qualname__", str(annotation))
    return f"{name}[{', '.join(type_name(arg) for arg in args)}]" if args else name


def _entry(cls: type, f: dataclasses.Field[Any], value: Any, *, path: str) -> Entry:
    if f.metadata.get("hidden"):
        return Entry(path=path, kind="hidden", value=value, annotation=None, owner=cls)
    annotation = _annotation(cls, f.name)
    if is_node(value):
        return Entry(path=path, kind="node", value=value, annotation=annotation or type(value), owner=cls)
    if callable(value):
        raise TypeError(f"{cls.__qualname__}.{f.name} holds code: give the field metadata=HIDDEN")
    if annotation is None:
        raise TypeError(f"{cls.__qualname__}.{f.name}: its type {f.type!r} cannot be resolved")
    empty = value is None or (isinstance(value, list | tuple) and not value)
    absent = empty and any(_is_component(arm) for arm in typing.get_args(annotation))
    kind: Literal["absent", "leaf"] = "absent" if absent else "leaf"
    return Entry(path=path, kind=kind, value=value, annotation=annotation, owner=cls)


def is_node(value: Any) -> bool:
    """Whether a value has fields of its own."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_node(item) and not isinstance(item, list | tuple) for item in value)
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_component(arm: Any) -> bool:
    return dataclasses.is_dataclass(arm) or getattr(arm, "_is_protocol", False)


@functools.cache
def _annotation(cls: type, name: str) -> Any:
    """The resolved type of a field, None if a name in it is out of reach (defined in a function)."""
    for base in cls.__mro__:
        annotation = inspect.get_annotations(base).get(name)
        if annotation is None:
            continue
        holder: Any = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            return typing.get_type_hints(holder, globalns=vars(sys.modules[base.__module__]))[name]
        except NameError:
            return None
    return None


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The string literal that follows each field in the source, by field; inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made at run time, or typed into a notebook
            continue
        # A nested class is indented; under a statement of its own it parses as it stands.
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
        definition = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
        for field, text in itertools.pairwise(definition.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs
