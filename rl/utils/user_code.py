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
import inspect
import linecache
import os
import pickle
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

TREE = Path(__file__).resolve().parents[2]
"""Folder of relay's own packages."""
OWN_PACKAGES = ("losses", "rl", "actors", "configs", "relay")
SAVED = ".pickle"
"""End of the files that hold a pickled function."""
MAX_FRAMES = 6
"""Most lines of the user's code that an error shows."""

_NO_ATTRIBUTE = re.compile(r"object has no attribute '(\w+)'")
_MISSING_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_UNEXPECTED_KEYWORD = re.compile(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")


def list_import_path() -> list[str]:
    """Return where this program finds modules, without those of Python and installed packages.

    In its own order: a module of the current folder must not take the place of one beside the
    script.
    """
    paths = []
    for path in (*sys.path, ""):
        folder = os.path.abspath(path or os.getcwd())
        if not is_of_python(folder) and folder not in paths:
            paths.append(folder)
    return paths


def is_own_module(name: str) -> bool:
    """Return whether a module is relay's."""
    return name.partition(".")[0] in OWN_PACKAGES


def is_of_python(folder: str) -> bool:
    """Return whether a folder has the modules of Python itself, or installed packages.

    Not by `sys.prefix`, which is /usr for many: a project in /usr/src is the user's.
    """
    path, library = Path(folder), Path(sysconfig.get_path("stdlib"))
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    is_archive = path.parent == library.parent and path.suffix == ".zip"
    return is_archive or path.is_relative_to(library)


# Errors


def describe_user_error(error: BaseException) -> str:
    """Return an error of a user's code: what it is, the nearest name for a typo, the user's lines.

    Example:
        NameError: name 'Confg' is not defined; did you mean 'Config'?
          my_task.py, line 12, in small
            task = Confg()
    """
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"  {_shorten(error.filename)}, line {error.lineno}"
        return f"{kind}: {error.msg}\n{place}\n    {(error.text or '').strip()}"
    near = find_near_name(error)
    lines = [f"{kind}: {error}"]
    if near is not None:
        lines = [f"{kind}: {error}; did you mean {near!r}?"]
    elif isinstance(error, ModuleNotFoundError):
        lines = [f"{kind}: {error}; it is neither a file beside yours nor installed here"]
    for frame in list(_select_user_frames(error.__traceback__))[-MAX_FRAMES:]:
        lines.append(f"  {_shorten(frame.filename)}, line {frame.lineno}, in {frame.name}")
        if frame.line:
            lines.append(f"    {frame.line}")
    return "\n".join(lines)


def find_near_name(error: BaseException) -> str | None:
    """Return the name that a user may have meant, of an error about an unknown name; else None."""
    frame = _find_last_frame(error.__traceback__)
    name, candidates, cutoff = "", list[str](), 0.6
    if isinstance(error, AttributeError) and (match := _NO_ATTRIBUTE.search(str(error))):
        # Python 3.11 sets `obj` where an attribute is read, and not where one is set.
        name = match[1]
        candidates = dir(error.obj if error.name else _find_object_with(name, frame))
    elif isinstance(error, AttributeError) and error.name:  # of a module
        name, candidates = error.name, dir(error.obj)
    elif isinstance(error, NameError) and error.name:
        name, candidates = error.name, dir(builtins)
        if frame is not None:
            candidates += [*frame.f_locals, *frame.f_globals]
    elif isinstance(error, ModuleNotFoundError) and error.name:
        # Among hundreds of installed modules something is always a little alike.
        name, candidates, cutoff = error.name, _list_modules(error.name.rpartition(".")[0]), 0.8
    elif isinstance(error, ImportError) and (match := _MISSING_NAME.search(str(error))):
        name = match[1]
        modules = [module.rpartition(".")[2] for module in _list_modules(match[2])]
        candidates = dir(sys.modules.get(match[2])) + modules
    elif isinstance(error, TypeError) and (match := _UNEXPECTED_KEYWORD.search(str(error))):
        name, candidates = match[2], _list_keywords(match[1], frame)
    public = [candidate for candidate in candidates if not candidate.startswith("__")]
    near = difflib.get_close_matches(name, public, n=1, cutoff=cutoff) if name else []
    return near[0] if near else None


def _find_object_with(attribute: str, frame: FrameType | None) -> Any:
    """Return the object of which a line sets an attribute, such as config.loop of
    `config.loop.num_step = 3`; None for a line that says it in another way.
    """
    if frame is None:
        return None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    match = re.search(rf"([A-Za-z_][\w.]*)\.{attribute}\b", line)
    if match is None:
        return None
    first, *rest = match[1].split(".")
    holder = {**frame.f_globals, **frame.f_locals}.get(first)
    for part in rest:
        holder = getattr(holder, part, None)
    return holder


def _list_modules(package: str) -> list[str]:
    """Return the dotted names of the modules in an imported package, or of all modules that can be
    imported for an empty name.
    """
    if package and package not in sys.modules:
        return []
    paths = getattr(sys.modules[package], "__path__", []) if package else None
    prefix = f"{package}." if package else ""
    modules = [module.name for module in pkgutil.iter_modules(paths, prefix)]
    return modules if package else [*modules, *sys.stdlib_module_names]


def _list_keywords(function: str, frame: FrameType | None) -> list[str]:
    """Return the parameters of the function that an error names, such as LoopConfig.__init__.

    Args:
        frame: that of the call.
    """
    keywords: list[str] = []
    for candidate in _find_functions(function, frame):
        try:
            keywords += inspect.signature(candidate).parameters
        except (TypeError, ValueError):  # of some functions in C nothing is known
            continue
    return keywords


def _find_functions(name: str, frame: FrameType | None) -> list[Callable[..., Any]]:
    """Return the classes and functions that may be the one of a name without its module."""
    owner = name.removesuffix(".__init__")
    if owner != name:
        return [cls for cls in _list_classes() if cls.__qualname__ == owner]
    if frame is None:
        return []
    values = [*frame.f_locals.values(), *frame.f_globals.values()]
    for module in [value for value in values if isinstance(value, ModuleType)]:
        values += vars(module).values()
    return [value for value in values if getattr(value, "__qualname__", None) == name]


def _list_classes() -> set[type]:
    """Return all classes of this process."""
    classes: set[type] = set()
    waiting: list[type] = [object]
    while waiting:
        subclasses: list[type] = type.__subclasses__(waiting.pop())
        for cls in subclasses:
            if cls not in classes:
                classes.add(cls)
                waiting.append(cls)
    return classes


def _find_last_frame(trace: TracebackType | None) -> FrameType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _select_user_frames(trace: TracebackType | None) -> Iterator[traceback.FrameSummary]:
    """Yield the frames that are neither relay's nor of an installed package or of Python."""
    others = [str(TREE / package) for package in OWN_PACKAGES]
    for frame in traceback.extract_tb(trace):
        is_file = os.path.exists(frame.filename) or frame.filename.startswith("<ipython")
        is_other = frame.filename.startswith(tuple(f"{path}/" for path in others))
        if is_file and not is_of_python(frame.filename) and not is_other:
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
    if not colon or not name or not module_name:
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
    return function


def _load_saved(file: Path) -> Callable[..., Any]:
    try:
        function = pickle.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever a module of the user's raises when it is imported
        raise ValueError(f"{str(file)!r} cannot be loaded: {describe_user_error(error)}") from error
    return function


def _import_place(name: str) -> ModuleType:
    """Import the module of a place; ValueErrors say what is wrong with it."""
    file = Path(name).expanduser().resolve()
    if name.endswith(".py") and not file.is_file():
        raise ValueError(f"there is no file {name!r}")
    if not name.endswith(".py") and not all(map(str.isidentifier, name.split("."))):
        raise ValueError(f"{name!r} is not the name of a module; a file is written with its .py")
    try:
        return _import_file(file) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself is missing, not one that it imports.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            near = find_near_name(error)
            hint = f"; did you mean {near!r}?" if near is not None else ""
            raise ValueError(
                f"there is no module {name!r} in this folder or among the installed packages{hint}"
            ) from None
        raise ValueError(f"{name} cannot be imported: {describe_user_error(error)}") from error
    except Exception as error:  # whatever a user's module raises
        raise ValueError(f"{name} cannot be imported: {describe_user_error(error)}") from error


def _import_file(file: Path) -> ModuleType:
    # The file's neighbours, as if it were the program that was started.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # A file may have the name of an installed module, or of relay's.
    name = f"relay_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _list_functions(holder: Any) -> list[str]:
    """Return the public functions and classes that a module defines, or those of a class."""
    names: list[str] = []
    for name, value in getattr(holder, "__dict__", {}).items():
        # An imported function belongs to another module.
        is_imported = isinstance(holder, ModuleType) and (
            getattr(value, "__module__", None) != holder.__name__
        )
        if callable(value) and not name.startswith("_") and not is_imported:
            names.append(name)
    return names
