"""Registry modules: plain functions without arguments that return a complete config.

A registry module is a module of the package `configs` (`sum_digits`), or any importable dotted
module. A variant is a function that calls another one and edits the config that it returns.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rl.config.configurable import Configurable
from rl.config.tree import ConfigError

PACKAGE = "configs"
ExplanationForm = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A complete config and the registry function that it comes from."""

    module: str
    function: str
    config: Any
    """The root config, an instance of some `Configurable.Config`."""
    defaults: Any = None
    """The config as the registry function returned it; None if a script made the config."""
    resumes: Path | None = None
    """Folder of the run that is continued; None for a new run."""
    explain: ExplanationForm | None = None
    """Form in which to explain the run instead of starting it; None: start it."""


def resolve(module: str, function: str) -> ResolvedRun:
    """Call a registry function and return its config; raises ConfigError, which lists the valid
    names.
    """
    functions = registry_functions(load_module(module))
    if function not in functions:
        names = ", ".join(functions) or "none"
        raise ConfigError(f"--config {function}: not a config of {module}; there are: {names}")
    config = functions[function]()
    if not isinstance(config, Configurable.Config):
        raise ConfigError(
            f"--config {function}: {module}.{function}() returned a {type(config).__qualname__}, "
            "not a Configurable.Config"
        )
    return ResolvedRun(module=module, function=function, config=config, defaults=config)


def load_module(name: str) -> ModuleType:
    """Return the module `name` of `configs`, or else the importable module of that dotted name."""
    if all(part.isidentifier() for part in name.split(".")):
        for candidate in (f"{PACKAGE}.{name}", name):
            try:
                return importlib.import_module(candidate)
            except ModuleNotFoundError as error:
                # The error of a module that exists but imports a missing one is raised unchanged.
                if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                    raise
    package = importlib.util.find_spec(PACKAGE)
    folders = None if package is None else package.submodule_search_locations
    shipped = (
        ", ".join(sorted(m.name for m in pkgutil.iter_modules(folders))) if folders else "none"
    )
    raise ConfigError(f"--module {name}: no such module; in {PACKAGE} are: {shipped}")


def registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the public functions that a module defines and that need no argument."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and all(
            p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(function).parameters.values()
        )
    }
