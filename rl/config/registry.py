"""Registry modules: plain functions that return a complete config and can be called without
arguments.

A registry module is a module of the package `configs` (`sum_digits`), or any importable dotted
module. A variant is a function that calls another one and edits the config that it returns.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

from rl.config.configurable import Configurable
from rl.config.tree import ConfigError
from rl.utils.user_code import TREE, describe_user_error, is_own_module

PACKAGE = "configs"
ExplanationForm = Literal["text", "full", "json"]
"""text: twelve lines; full: everything, as YAML; json: the same as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A run that a command line or a script asks for: a complete config, and its origin.

    Example:
        `--module sum_digits --config tiny --loop.num_steps 5` is
        RunRequest(module="sum_digits", function="tiny", config=<tiny() with 5 steps>,
        defaults=<tiny()>).
    """

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

    @property
    def origin(self) -> str:
        """Return the dotted name of the registry function, such as sum_digits.tiny."""
        return f"{self.module}.{self.function}"


class RootComponent(Protocol):
    """The component of a root config, which a command line runs.

    There are two: `actors.controller.Controller` runs a training run, and
    `rl.tinker.http_server.TinkerServer` serves the Tinker API.
    """

    def __init__(self, *, config: Any, request: RunRequest) -> None: ...

    def run(self) -> object:
        """Run to the end; raise ValueError for a config that cannot run."""


@runtime_checkable
class ExplainableComponent(RootComponent, Protocol):
    """A root component that can tell about a run without starting it: the Controller."""

    def explain(self, form: ExplanationForm) -> int:
        """Print the run of the config and what is refused; return the exit status."""


def resolve(
    module: str, function: str, *, arguments: Mapping[str, Any] | None = None
) -> RunRequest:
    """Call a registry function and return its config.

    Raises:
        ConfigError: there is no such module or function, with the valid names, or it raises an
            error, with the lines of the user's code.
    """
    config = _call(find_function(module, function), module, function, arguments or {})
    if not isinstance(config, Configurable.Config):
        raise ConfigError(
            f"--config {function}: {module}.{function}() returned a {type(config).__qualname__}, "
            "not a Configurable.Config"
        )
    return RunRequest(module=module, function=function, config=config, defaults=config)


def find_function(module: str, function: str) -> Callable[..., Any]:
    """Return a registry function; raises ConfigError, which lists the valid names."""
    functions = list_registry_functions(load_module(module))
    if function not in functions:
        near = difflib.get_close_matches(function, functions, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        names = ", ".join(functions) or "none"
        raise ConfigError(
            f"--config {function}: not a config of {module}; {hint}there are: {names}"
        )
    return functions[function]


def _call(
    make: Callable[..., Any], module: str, function: str, arguments: Mapping[str, Any]
) -> Any:
    try:
        return make(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        # Of relay's own configs the message says all; of a user's the lines count too.
        if isinstance(error, ValueError) and is_own_module(make.__module__):
            raise ConfigError(str(error)) from error
        raise ConfigError(
            f"--config {function}: {module}.{function}() raised {describe_user_error(error)}"
        ) from error


def load_module(name: str) -> ModuleType:
    """Return the module `name` of `configs`, or else the importable module of that dotted name.

    Raises:
        ConfigError: there is no such module, or it raises an error when it is imported.
    """
    # A path such as ../x is no module; import_module would fail for it with an error of its own.
    if all(map(str.isidentifier, name.split("."))) and not name.endswith(".py"):
        # First here: an installed package of the same name must not take the place of a config.
        for candidate in (f"{PACKAGE}.{name}", name):
            try:
                return importlib.import_module(candidate)
            except ModuleNotFoundError as error:
                # The error of a module that exists but imports a missing one is another.
                if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                    raise ConfigError(f"--module {name}: {describe_user_error(error)}") from error
            except Exception as error:  # whatever a module raises when it is imported
                raise ConfigError(f"--module {name}: {describe_user_error(error)}") from error
    raise ConfigError(f"--module {name}: no such module{_describe_missing_module(name)}")


def _describe_missing_module(name: str) -> str:
    """Return what to write instead of a name that is no module."""
    file = Path(name)
    if name.endswith(".py") and file.is_file():
        parts = file.with_suffix("").parts
        if all(map(str.isidentifier, parts)):
            return f": write --module {'.'.join(parts)}"
        return f": write --module {file.stem}, and start in the folder {str(file.parent)!r}"
    if Path(f"{name}.py").is_file():
        return f": the name of {name}.py must be that of a Python module, without - or spaces"
    names = _list_module_names()
    near = difflib.get_close_matches(name, [*names, *(path.stem for path in Path().glob("*.py"))])
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint}; in {PACKAGE} are: {', '.join(names) or 'none'}"


def refuse_two_files(name: str) -> None:
    """Raise ConfigError if a file of the user has the name of one of relay's config modules."""
    ours = TREE / PACKAGE / f"{name}.py"
    theirs = [Path(f"{name}.py"), Path(name, "__init__.py")]
    file = next((path for path in theirs if path.is_file()), None)
    if file is None or not ours.is_file() or file.resolve() == ours.resolve():
        return
    raise ConfigError(
        f"--module {name} could be {file} or relay's own {ours}: write {PACKAGE}.{name} for "
        "relay's, or rename yours"
    )


def _list_module_names() -> list[str]:
    package = importlib.util.find_spec(PACKAGE)
    # None outside of the project's folder, where a script may still name its own module.
    if package is None or package.submodule_search_locations is None:
        return []
    return sorted(
        module.name for module in pkgutil.iter_modules(package.submodule_search_locations)
    )


def list_registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the public functions that a module defines and that need no argument."""
    functions: dict[str, Callable[[], Any]] = {}
    for name, function in vars(module).items():
        # An imported function belongs to another module's registry.
        if getattr(function, "__module__", None) == module.__name__ and _is_config(name, function):
            functions[name] = function
    return functions


def _is_config(name: str, function: Any) -> bool:
    """Return whether this is a public function that can be called without an argument."""
    if name.startswith("_") or not inspect.isfunction(function):
        return False
    for parameter in inspect.signature(function).parameters.values():
        is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_rest:
            return False
    return True
