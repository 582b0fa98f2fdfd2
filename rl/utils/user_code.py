"""A user's own code: loaded by its place, with errors that show the user's own lines.

A place is `module:function`, `folder/file.py:function`, or a file that `save_function` wrote
(`rl.rollouts.reward_functions`).
"""

from __future__ import annotations

import builtins
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

TREE = Path(__file__).resolve().parents[2]
"""Folder of relay's own packages."""
OWN_PACKAGES = ("losses", "rl", "actors", "configs", "relay")
SAVED = ".pickle"
"""End of the files that hold a pickled function."""
MAX_FRAMES = 6
"""Most lines of the user's code that an error shows."""

_MISSING_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_UNEXPECTED_KEYWORD = re.compile(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")


def is_own_module(name: str) -> bool:
    """Return whether a module is relay's."""
    return name.partition(".")[0] in OWN_PACKAGES


# Errors


def describe_user_error(error: BaseException) -> str:
    """Return an error of a user's code: what it is, the nearest name for a typo, the user's lines.

    Example:
        NameError: name 'Confg' is not defined; did you mean 'Config'?
          my_task.py, line 12, in small
            task = Confg()
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        line = (error.text or "").strip()
        where = f"{_shorten(error.filename)}, line {error.lineno}"
        return f"SyntaxError: {error.msg}\n  {where}\n    {line}"
    near = find_near_name(error)
    if near is not None:
        text = f"{text}; did you mean {near!r}?"
    lines = [text]
    for frame in list(_select_user_frames(error.__traceback__))[-MAX_FRAMES:]:
        lines.append(f"  {_shorten(frame.filename)}, line {frame.lineno}, in {frame.name}")
        if frame.line:
            lines.append(f"    {frame.line}")
    return "\n".join(lines)


def find_near_name(error: BaseException) -> str | None:
    """Return the name that a user may have meant, of an error about an unknown name; else None."""
    name, candidates = "", list[str]()
    if isinstance(error, AttributeError) and error.name:
        name, candidates = error.name, dir(error.obj)
    elif isinstance(error, NameError) and error.name:
        frame = _find_last_frame(error.__traceback__)
        name, candidates = error.name, dir(builtins)
        if frame is not None:
            candidates += [*frame.tb_frame.f_locals, *frame.tb_frame.f_globals]
    elif isinstance(error, ImportError) and (match := _MISSING_NAME.search(str(error))):
        name, candidates = match[1], dir(sys.modules.get(match[2]))
    elif isinstance(error, TypeError) and (match := _UNEXPECTED_KEYWORD.search(str(error))):
        name, candidates = match[2], _list_keywords(match[1])
    public = [candidate for candidate in candidates if not candidate.startswith("__")]
    near = difflib.get_close_matches(name, public, n=1) if name else []
    return near[0] if near else None


def _list_keywords(function: str) -> list[str]:
    """Return the fields of the dataclass whose `__init__` an error names, such as
    LoopConfig.__init__.
    """
    for cls in _iterate_classes(object):
        if f"{cls.__qualname__}.__init__" == function:
            return list(getattr(cls, "__dataclass_fields__", ()))
    return []


def _iterate_classes(base: type) -> Iterator[type]:
    for cls in type.__subclasses__(base):
        yield cls
        if cls is not type:
            yield from _iterate_classes(cls)


def _find_last_frame(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _select_user_frames(trace: TracebackType | None) -> Iterator[traceback.FrameSummary]:
    """Yield the frames that are neither relay's nor of an installed package or of Python."""
    installed = [sys.prefix, sys.base_prefix]
    installed += [str(TREE / package) for package in OWN_PACKAGES]
    for frame in traceback.extract_tb(trace):
        is_file = os.path.exists(frame.filename) or frame.filename.startswith("<ipython")
        if is_file and not frame.filename.startswith(tuple(f"{path}/" for path in installed)):
            yield frame


def _shorten(filename: str) -> str:
    """Return a path relative to the current folder, if it lies there."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


# Functions by their place


@functools.lru_cache(maxsize=64)
def load_function(place: str) -> Callable[..., Any]:
    """Return the function at a place.

    Raises:
        ValueError: there is no such file, module or function, or the module raises an error.

    Example:
        >>> load_function("my_rewards:is_right")
        <function is_right at 0x...>
    """
    if place.endswith(SAVED):
        return _load_saved(Path(place))
    module_name, colon, name = place.rpartition(":")
    if not colon or not name:
        raise ValueError(f"{place!r} must be module:function or file.py:function")
    module = _import_place(module_name)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            near = difflib.get_close_matches(part, _list_functions(function), n=1, cutoff=0.5)
            there = ", ".join(_list_functions(function)) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"its functions are: {there}"
            raise ValueError(f"{place!r}: {module_name} has no {part!r}; {hint}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"{place!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _load_saved(file: Path) -> Callable[..., Any]:
    try:
        function = pickle.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever a module of the user's raises when it is imported
        raise ValueError(f"{str(file)!r} cannot be loaded: {describe_user_error(error)}") from error
    return function  # type: ignore[no-any-return]


def _import_place(name: str) -> ModuleType:
    """Import the module of a place; ValueErrors say what is wrong with it."""
    try:
        if name.endswith(".py"):
            return _import_file(Path(name))
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself is missing, not one that it imports.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {name!r} in this folder or among the installed packages"
            ) from None
        raise ValueError(f"{name} cannot be imported: {describe_user_error(error)}") from error
    except ValueError:
        raise
    except Exception as error:  # whatever a user's module raises
        raise ValueError(f"{name} cannot be imported: {describe_user_error(error)}") from error


def _import_file(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    # The file's neighbours, as if it were the program that was started.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # A file may have the name of an installed module, or of relay's.
    name = f"relay_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _list_functions(holder: Any) -> list[str]:
    names: Iterable[str] = vars(holder) if hasattr(holder, "__dict__") else ()
    return [name for name in names if not name.startswith("_") and callable(getattr(holder, name))]
