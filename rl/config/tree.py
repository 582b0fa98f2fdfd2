"""A config as a tree: its fields with path, type and docstring, and copies with changed values.

Command line, help and JSON all use this walk, so they agree about what a config contains. Nodes are
dataclasses (a `Configurable.Config`, a loss's settings) and non-empty lists or tuples of them,
whose elements are named by index; everything else is a leaf.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

NodeT = TypeVar("NodeT")


class ConfigError(ValueError):
    """A user's mistake in a configuration; the text is the whole message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigEntry:
    """One field of a config."""

    path: str
    """Dotted path from the root."""
    kind: Literal["leaf", "node", "absent", "hidden"]
    """absent: an optional node that is None, or an empty sequence of nodes; hidden: holds code."""
    value: Any
    annotation: Any
    owner: type
    """The dataclass that has the field, or the sequence that has the element."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def optional(self) -> bool:
        """True if the field may be None."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def absence(self) -> str:
        """The value of an absent entry in words."""
        return "None" if self.value is None else "empty"

    @property
    def doc(self) -> str:
        """The field's docstring."""
        return read_field_docs(self.owner).get(self.name, "")


def list_children(node: Any, *, prefix: str = "") -> list[ConfigEntry]:
    """Return the fields of one node, in order; raises TypeError for code in a field that is not
    hidden.
    """
    if isinstance(node, list | tuple):
        return list(_list_items(node, prefix=prefix))
    return list(_list_fields(node, prefix=prefix))


def _list_items(node: Sequence[Any], *, prefix: str) -> Iterator[ConfigEntry]:
    for number, item in enumerate(node):
        yield ConfigEntry(
            path=f"{prefix}{number}",
            kind="node",
            value=item,
            annotation=type(item),
            owner=type(node),
        )


def _list_fields(node: Any, *, prefix: str) -> Iterator[ConfigEntry]:
    cls: Any = type(node)
    for f in dataclasses.fields(cls):
        if not f.init:
            continue
        value, annotation = getattr(node, f.name), _get_hints(cls)[f.name]
        kind = "hidden" if f.metadata.get("hidden") else _find_kind(value, annotation)
        if kind == "leaf":
            _check_leaf(value, annotation, name=f"{cls.__qualname__}.{f.name}")
        yield ConfigEntry(
            path=prefix + f.name, kind=kind, value=value, annotation=annotation, owner=cls
        )


def _check_leaf(value: Any, annotation: Any, *, name: str) -> None:
    """Raise TypeError for a value that JSON cannot hold."""
    # A class in place of a component is a mistake of the user's; `rebuild` says so.
    if callable(value) and not _is_component(annotation) and _is_of_type(value, annotation):
        raise TypeError(f"{name} holds code: give the field metadata=HIDDEN")
    if isinstance(value, enum.Enum):
        raise TypeError(f"{name} is an enum: make it a Literal of strings")


def _find_kind(value: Any, annotation: Any) -> Literal["leaf", "node", "absent"]:
    if is_node(value):
        return "node"
    # None, or no element yet, where the type says that components may be there.
    is_empty = value is None or (isinstance(value, list | tuple) and not value)
    if is_empty and any(map(_is_component, typing.get_args(annotation))):
        return "absent"
    return "leaf"


def _is_of_type(value: Any, annotation: Any) -> bool:
    with contextlib.suppress(ValueError):
        convert(value, annotation)
        return True
    return False


def _is_component(annotation: Any) -> bool:
    """Return True for the type of a node."""
    # A loss has the type of a protocol, and is a dataclass with settings like other components.
    return dataclasses.is_dataclass(annotation) or _is_protocol(annotation)


def walk(node: Any, *, prefix: str = "") -> Iterator[ConfigEntry]:
    """Yield every entry below `node`, depth first; a node precedes its fields."""
    for entry in list_children(node, prefix=prefix):
        yield entry
        if entry.kind == "node":
            yield from walk(entry.value, prefix=f"{entry.path}.")


def find_input_paths(config: Any) -> dict[str, Path]:
    """Return the existing files and folders that the config names, by path of the field."""
    paths: dict[str, Path] = {}
    for entry in walk(config):
        if entry.kind != "leaf" or not isinstance(entry.value, str | Path) or not str(entry.value):
            continue
        path = Path(entry.value)
        # A text can be too long for a file name.
        with contextlib.suppress(OSError):
            if path.expanduser().exists():
                paths[entry.path] = path
    return paths


def rebuild(node: NodeT, changes: Mapping[str, Any] | None = None, *, prefix: str = "") -> NodeT:
    """Return a copy with the values of `changes`, by path; every `__post_init__` runs on the
    result.

    Raises:
        ConfigError: a value is not of its field's type, or a `__post_init__` refused the values;
            the message starts with the node's path.
        TypeError: a `__post_init__` changed a field; it may only validate.
    """
    changes = changes or {}
    values: dict[str, Any] = {}
    cls: Any = type(node)
    with _name_node_in_errors(prefix, node):
        for entry in list_children(node, prefix=prefix):
            # A value of `changes` replaces a component whole; its fields are checked by its class.
            value = changes.get(entry.path, entry.value)
            if entry.path not in changes and entry.kind == "node":
                value = rebuild(value, changes, prefix=f"{entry.path}.")
            try:
                convert(value, entry.annotation)
            except ValueError:
                must = describe_type(entry.annotation)
                raise ConfigError(f"{entry.path}={show_value(value)}: must be {must}") from None
            values[entry.name] = value

        if isinstance(node, list | tuple):
            return cls(values.values())
        built = cls(**values)

    # A `__post_init__` that sets a field would hide from config.json what the user has set.
    for name, value in values.items():
        if getattr(built, name) is not value:
            raise TypeError(
                f"{cls.__qualname__}.__post_init__ rewrites {name!r}; it may only validate"
            )
    return built


def replace_values(node: NodeT, changes: Mapping[str, Any]) -> NodeT:
    """Return a copy with the values of `changes`, by path; other components are shared.

    For values that the program chooses for a config that is checked: only the components on the way
    to a value check their fields again. `rebuild` judges the values of a user.
    """
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    for name, below in inner.items():
        values[name] = replace_values(getattr(node, name), below)
    return dataclasses.replace(node, **values)  # type: ignore[type-var]


def check_fields(node: Any) -> None:
    """Validate a config whose fields may have been edited since its construction; raises as
    `rebuild`.
    """
    rebuild(node)


def check_bounds(
    config: Any,
    *names: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ValueError for the first of these fields that is out of bounds or NaN; None is always
    accepted.
    """
    bounds = (
        (at_least, operator.ge, "at least"),
        (above, operator.gt, "above"),
        (at_most, operator.le, "at most"),
        (below, operator.lt, "below"),
    )
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        # Each comparison with NaN is false, so that NaN is out of all bounds.
        is_valid = True
        must: list[str] = []
        for bound, compare, word in bounds:
            if bound is not None:
                is_valid = is_valid and compare(value, bound)
                must.append(f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}")
        if not is_valid:
            raise ValueError(f"{name}={value}: must be {' and '.join(must)}")


def is_node(value: Any) -> bool:
    """Return True if a value has fields of its own."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_component_config, value))
    return _is_component_config(value)


def _is_component_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def convert(value: Any, annotation: Any, *, from_json: bool = False) -> Any:
    """Return a value as its annotated type (a list as a tuple, an integer as a float), or raise
    ValueError.

    With `from_json` paths and infinite numbers are read from strings. A protocol accepts an
    instance with its methods.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    again = functools.partial(convert, from_json=from_json)
    if origin in (typing.Union, types.UnionType):
        for arm in args:
            with contextlib.suppress(ValueError):
                return again(value, arm)
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(value, list | tuple):
            # tuple[float, float] has an arm for each item, tuple[int, ...] and list[int] have one.
            arms = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(value)
            if len(arms) == len(value):
                return (tuple if origin is tuple else list)(map(again, value, arms))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {again(key, args[0]): again(item, args[1]) for key, item in value.items()}
    elif from_json and annotation is float and value in ("inf", "-inf", "nan"):
        return float(value)
    elif from_json and _is_path(annotation) and isinstance(value, str):
        return annotation(value)
    elif _is_instance(value, annotation):
        # A number such as 1 for 1.0 must compare and print like the float that it stands for.
        return float(value) if annotation is float and type(value) is int else value
    raise ValueError(f"{value!r} is not of type {describe_type(annotation)}")


def _is_instance(value: Any, annotation: Any) -> bool:
    """Return whether a value is of a type without arguments, or one of a literal's choices."""
    if typing.get_origin(annotation) is Literal:
        # True equals 1, so that the types have to agree too.
        choices = typing.get_args(annotation)
        return any(value == choice and type(value) is type(choice) for choice in choices)
    if annotation in (int, float):
        kind = Integral if annotation is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if annotation is None:
        return value is None
    if _is_protocol(annotation):
        return not isinstance(value, type) and has_members(value, annotation)
    if isinstance(annotation, type) and annotation is not Any:
        return isinstance(value, annotation)
    return True


def _is_path(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Path)


def _is_protocol(annotation: Any) -> bool:
    return getattr(annotation, "_is_protocol", False)


def has_members(value: Any, protocol: type) -> bool:
    """Return whether a value has a protocol's methods and attributes."""
    for base in protocol.__mro__:
        if not _is_protocol(base):
            continue
        for name in (*vars(base), *vars(base).get("__annotations__", {})):
            # `__module__`, `_abc_impl` and the like are Python's; a loss is a protocol with a call.
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and not hasattr(value, name):
                return False
    return True


def show_value(value: Any) -> str:
    """Return a value as an error shows it: of a component the name, of a class how to use it."""
    # `config.warmup = SupervisedWarmup` is a frequent slip, which the name alone would not explain.
    if isinstance(value, type):
        return f"{value.__qualname__} (the class; {value.__qualname__}() is an instance)"
    return type(value).__qualname__ if is_node(value) else repr(value)


def describe_type(annotation: Any) -> str:
    """Return a type as a user reads it: `float | None`, `'linear' | 'cosine'`, `tuple[int,
    ...]`.
    """
    if annotation in (None, type(None), Ellipsis):
        return "..." if annotation is Ellipsis else "None"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(describe_type, args))
    name = getattr(origin or annotation, "__qualname__", str(annotation))
    return f"{name}[{', '.join(map(describe_type, args))}]" if args else name


@functools.cache
def read_field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstrings of a dataclass's fields by name, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            # A class made at run time, or typed into a notebook, has no source.
            continue
        docs |= _parse_docs(source)
    return docs


def _parse_docs(source: str) -> dict[str, str]:
    """Return the strings that follow the fields of the first class of a source."""
    # A nested class is indented; under a statement of its own it can be parsed.
    tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(definition.body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = inspect.cleandoc(text)
    return docs


@functools.cache
def _get_hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_about_field(message: str, node: Any) -> bool:
    """Return True if an error's message begins with the name of a field of `node`."""
    return re.split(r"\W", message, maxsplit=1)[0] in getattr(node, "__dataclass_fields__", ())


@contextlib.contextmanager
def name_as_options(path: str, node: Any) -> Iterator[None]:
    """Prefix a ValueError that begins with a field of `node` with the node's path."""
    try:
        yield
    except ValueError as error:
        # An error about something else, such as a file, names it already.
        if not _is_about_field(str(error), node):
            raise
        raise ValueError(f"{path}.{error}") from error


@contextlib.contextmanager
def _name_node_in_errors(prefix: str, node: Any) -> Iterator[None]:
    """Turn a ValueError into a ConfigError whose message starts with the node's path."""
    try:
        yield
    except ConfigError:
        # Of a node below, and complete.
        raise
    except ValueError as error:
        path, message = prefix.rstrip("."), str(error)
        parent, dot, name = path.rpartition(".")
        if name and message.startswith(f"{name}."):  # the component has named itself
            message = f"{parent}{dot}{message}"
        elif path:
            message = f"{path}{'.' if _is_about_field(message, node) else ': '}{message}"
        raise ConfigError(message) from error
