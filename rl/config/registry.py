"""Where run configs come from: plain functions without arguments that return a complete one.

A registry module is one of the package `configs` (`sum_digits`) or any importable dotted
module. A variant is a function that calls another and edits what it returns.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rl.config.configurable import Configurable
from rl.config.tree import ConfigError

PACKAGE = "configs"
ExplanationForm = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A complete config and the registry function it started from."""

    module: str
    function: str
    config: Any
    """The root config, an instance of some `Configurable.Config`."""
    resumes: Path | None = None
    """Folder of the run that goes on; None for a new run."""
    file: Path | None = field(default=None, compare=False)
    """The config.json that its values come from, where they do."""
    options: tuple[str, ...] = field(default=(), compare=False)
    """Paths of the fields that the command line has set."""
    explain: ExplanationForm | None = None
    """How to show what the run would be, instead of running it; None: run it."""


def resolve(module: str, function: str) -> ResolvedRun:
    """Call the registry function.

    Raises:
        ConfigError: no such module (lists those of `configs`) or function (lists the
            module's), or the function returns no config.
    """
    loaded = load_module(module)
    functions = registry_functions(loaded)
    if function not in functions:
        names = ", ".join(functions) or "none"
        raise ConfigError(f"--config {function}: not a config of {module}; there are: {names}")
    config = functions[function]()
    if not isinstance(config, Configurable.Config):
        raise ConfigError(
            f"--config {function}: {module}.{function}() returned a {type(config).__qualname__}, "
            "not a Configurable.Config"
        )
    return ResolvedRun(module=module, function=function, config=config)


def load_module(name: str) -> ModuleType:
    """The module of `configs` called `name`, else the importable module of that dotted name."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"--module {name}: not a module name; in {PACKAGE} are: {_shipped()}")
    for candidate in (f"{PACKAGE}.{name}", name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # A module that exists but imports something missing must say so, not "unknown".
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise
    raise ConfigError(f"--module {name}: no such module; in {PACKAGE} are: {_shipped()}")


def registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Public functions of a module that need no argument and return a config, as far as is annotated."""
    found: dict[str, Callable[[], Any]] = {}
    for name, function in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            continue
        if _returns_config(function, module):
            found[name] = function
    return found


def _returns_config(function: Callable[[], Any], module: ModuleType) -> bool:
    if "return" not in function.__annotations__:
        return function.__module__ == module.__name__
    try:
        returned = typing.get_type_hints(function)["return"]
    except NameError:  # imported for type checkers only
        return str(function.__annotations__["return"]).endswith("Config")
    return isinstance(returned, type) and issubclass(returned, Configurable.Config)


def _shipped() -> str:
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return "none"
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    return ", ".join(names) or "none"
