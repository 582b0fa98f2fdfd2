"""The command line of a run: `--module NAME --config FUNCTION --trainer.optimizer.lr 1e-4`.

A registry function returns a complete config, and every leaf of *that instance* is an option,
fields of a subclass in a nested place included. An option is looked up in the instance's tree
before tyro converts its value, so a misspelled option can never become a default. `--from_json
outputs/x/config.json` starts from a run's file instead, without the fields marked `ONE_RUN`.
`--resume outputs/x` continues that run in its own folder. `--explain` shows what the run would be
and starts nothing.

tyro parses single values. `tyro.cli(type(config), default=config)` understands the whole tree but a
loss, which has the type of a protocol. It has no `--warmup None`, no bare `--overwrite` and no
`--name -dash`, suggests options far from the typed option, and prints a box for each error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from rl.config.arguments import take_arguments
from rl.config.common_options import ALIASES, find_path, find_short_name
from rl.config.help import SOURCE_OPTIONS, print_help
from rl.config.json import LOCATION, read_json
from rl.config.known_names import KnownName, describe_all, find_exact, find_similar
from rl.config.registry import (
    ExplainableComponent,
    ExplanationForm,
    RootComponent,
    RunRequest,
    find_function,
    refuse_two_files,
    resolve,
)
from rl.config.tree import ConfigEntry, ConfigError, describe_type, list_children, rebuild, walk
from rl.utils.caches import ensure_private_caches
from rl.utils.errors import RunError
from rl.utils.namespaces import enter_user_namespace
from rl.utils.printing import print_error
from rl.utils.processes import disable_collections
from rl.utils.proxies import allow_loopback

HELP = ("help", "help_all")
USES_NETWORK = re.compile(r"launch\.(isolate_network [Ff]alse|hosts (slurm|kubernetes))")
"""Options with which the actors get no network namespace (`actors.launch.isolation`)."""
KEPT_FILE = re.compile(r"/.*/(data|functions)/[\w-]+\.\w+")
"""Files that `relay.grpo` writes beside its runs."""
_ABSENT = "a registry function can turn it on"


def main(
    argv: Sequence[str] | None = None,
    *,
    default_module: str,
    default_config: str,
    prog: str,
    early: Callable[[Sequence[str]], AbstractContextManager[None]] | None = None,
) -> int:
    """Parse the command line, build the run's root component and run it; return the exit status.

    0 after success, 1 after a run that stopped, 2 for a config that cannot run, 130 after Ctrl-C.

    Args:
        early: a block around all that follows, for what may start before the config is known.
    """
    argv = sys.argv[1:] if argv is None else argv
    prepare_process(network=USES_NETWORK.search(" ".join(argv).replace("=", " ")) is not None)
    with nullcontext() if early is None else early(argv):
        # The config's module imports everything that the run needs: many objects, no garbage.
        with disable_collections():
            request = parse_cli(
                argv,
                default_module=default_module,
                default_config=default_config,
                prog=prog,
            )
        status, message = run_request(request)
    if message:
        print_error(message)
    return status


def prepare_process(*, network: bool) -> None:
    """Prepare this process for a run, before it has a second thread.

    Args:
        network: True if the actors use the machine's network instead of one of their own.
    """
    # The order counts. A namespace shows root's folders as nobody's, so that caches come before; a
    # process with threads, which the config's module may start, cannot enter it.
    allow_loopback()
    ensure_private_caches()
    if not network:
        enter_user_namespace()


def run_request(request: RunRequest) -> tuple[int, str]:
    """Run the root component of a request, and return the exit status and what to say of it."""
    try:
        # The root of a training run is `actors.controller.Controller`. It is not made by
        # `config.build`, which would judge the config again: nothing has touched the config since.
        root: type[RootComponent] = request.config.owner
        if request.explain is None:
            root(config=request.config, request=request).run()
            return 0, ""
        if not issubclass(root, ExplainableComponent):
            raise ValueError(f"--explain: {request.origin} is not a training run")
        return root(config=request.config, request=request).explain(request.explain), ""
    except ValueError as error:
        return 2, f"error: {error}"
    except RunError as error:
        return 1, f"error: the run stopped: {error}"
    except KeyboardInterrupt:
        return 130, "stopped by Ctrl-C"


def parse_cli(
    argv: Sequence[str],
    *,
    default_module: str,
    default_config: str | None = None,
    prog: str | None = None,
) -> RunRequest:
    """Return the run that a command line describes; without `default_config` it must have
    `--config`.

    Raises:
        SystemExit: 2 after errors on stderr that name what is wrong and what is valid; 0 after
            `--help`.
    """
    try:
        options, shows_help = _split(argv)
        request, changes = _find_request(
            options, default_module=default_module, default_config=default_config
        )
        # The config is judged once, with everything that the command line changes.
        changes |= _read_changes(request.config, options)
        request = dataclasses.replace(request, config=rebuild(request.config, changes))
    except ConfigError as error:
        print_error(f"error: {error}")
        raise SystemExit(2) from None
    if shows_help is not None:
        print_help(request, prog=prog, with_all=shows_help == "help_all")
    return request


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], str | None]:
    """Return the values by option name (with underscores), of which the last wins, and `help` or
    `help_all` if either was given.
    """
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for token in argv:
        if token == "-h":
            values = options["help"] = []
        elif token.startswith("--") and token != "--":
            # `--name=-dash` gives a value that itself looks like an option.
            name, equals, value = token[2:].partition("=")
            values = options[name.replace("-", "_")] = [value] if equals else []
        # An option's first value is its own, such as --name learning_rate=1e-5.
        elif values is None or (values and _is_assignment(token)):
            raise ConfigError(_describe_stray(token))
        else:
            values.append(token)
    shows_help = next((name for name in reversed(HELP) if name in options), None)
    for name in HELP:
        options.pop(name, None)
    return options, shows_help


def _is_assignment(token: str) -> bool:
    """Return whether this is an option as verl and the Tinker cookbook write theirs: name=value."""
    name, equals, _ = token.lstrip("+").partition("=")
    return bool(equals) and bool(find_exact(name))


def _describe_stray(token: str) -> str:
    """Return the error for a value without an option."""
    text = f"{token!r} belongs to no option; options are written --name value"
    known = find_exact(token.lstrip("+").partition("=")[0]) if _is_assignment(token) else ()
    return f"{text}; {describe_all(known)}" if known else text


def _find_request(
    options: dict[str, list[str]], *, default_module: str, default_config: str | None
) -> tuple[RunRequest, dict[str, Any]]:
    """Return the run without its overrides, and the values by path that its origin changes.

    Removes the options of `SOURCE_OPTIONS`.
    """
    given = _take_source_options(options)
    explain: Any = given.pop("explain", None)
    if explain is not None and explain not in (forms := typing.get_args(ExplanationForm)):
        *first, last = forms
        raise ConfigError(f"--explain {explain}: must be {', '.join(first)} or {last}, or nothing")
    for name in ("resume", "from_json"):
        if name in given and len(given) > 1:
            raise ConfigError(
                f"--{name} has its own module and config: leave out {' and '.join(given)}"
            )

    changes: dict[str, Any] = {}
    if "resume" in given:
        request, changes = _resume(Path(given["resume"]), options)
    elif "from_json" in given:
        request = read_json(Path(given["from_json"]), before=print_error)
        # The name, and the permission to overwrite it, are those of the run that wrote the file.
        for f in dataclasses.fields(request.config):
            if f.metadata.get("one_run"):
                changes[f.name] = f.default
    else:
        # An empty name finds nothing, so the error lists what the module has.
        module = given.get("module", default_module)
        # A module that nobody named is relay's own, whatever files this folder has.
        if "module" in given:
            refuse_two_files(module)
        function = given.get("config", default_config or "")
        arguments = take_arguments(find_function(module, function), options)
        request = resolve(module, function, arguments=arguments)
        # Numbers are changes of the config; names say which config it is.
        named = {key: value for key, value in arguments.items() if not isinstance(value, int)}
        if named != arguments:
            defaults = resolve(module, function, arguments=named).config
            request = dataclasses.replace(request, defaults=defaults)

    # Such a field could never be set: the option is taken before the config is known.
    clash = _name_fields(request.config) & {*SOURCE_OPTIONS, *HELP}
    if clash:
        raise TypeError(
            f"{type(request.config).__qualname__} has fields named like options: {sorted(clash)}"
        )
    return dataclasses.replace(request, explain=explain), changes


def _take_source_options(options: dict[str, list[str]]) -> dict[str, str]:
    """Remove the options of `SOURCE_OPTIONS`, and return their values."""
    given: dict[str, str] = {}
    for name in SOURCE_OPTIONS:
        if name not in options:
            continue
        values = options.pop(name)
        if name == "explain" and not values:
            values = ["text"]
        if len(values) != 1:
            raise ConfigError(f"--{name} takes one value, not {values!r}")
        given[name] = values[0]
    return given


def _name_fields(config: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(config)}


def _resume(folder: Path, options: Container[str]) -> tuple[RunRequest, dict[str, Any]]:
    """Return the run of a folder, and the values that place it there."""
    for name in LOCATION:
        if name in options:
            raise ConfigError(f"--resume continues a run in its own folder: leave out --{name}")
    path = folder.expanduser().absolute()
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"--resume {folder}: not the folder of a run: it has no config.json")
    request = read_json(file, before=print_error)
    if not set(LOCATION) <= _name_fields(request.config):
        raise ConfigError(f"--resume {folder}: {request.origin} is not a training run")
    # The folder may have been moved since, so that its place says more than its config.json; the
    # type of the field is str or Path.
    dump_folder = type(request.config.dump_folder)(path.parent)
    changes = {"name": path.name, "dump_folder": dump_folder, "overwrite": False}
    for entry in walk(request.config):
        if entry.kind == "leaf":
            found = _find_moved(entry.value, beside=path.parent)
            if found != entry.value:
                changes[entry.path] = found
    return dataclasses.replace(request, resumes=path), changes


def _find_moved(value: Any, *, beside: Path) -> Any:
    """Return a value in which files that were moved with the runs beside them have their new place.

    Rows and functions that were given as Python objects lie there (`relay.grpo`).
    """
    if isinstance(value, tuple):
        return tuple(_find_moved(item, beside=beside) for item in value)
    if isinstance(value, dict):
        return {name: _find_moved(item, beside=beside) for name, item in value.items()}
    if not isinstance(value, str) or not KEPT_FILE.fullmatch(value) or Path(value).exists():
        return value
    file = Path(value)
    moved = beside / file.parent.name / file.name
    return str(moved) if moved.is_file() else value


def set_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a config with values by option: a dotted path or a short name.

    Raises:
        ConfigError: an option is unknown, with the nearest valid ones, or a value does not fit.
    """
    entries = {entry.path: entry for entry in walk(config)}
    changes: dict[str, Any] = {}
    for option, value in values.items():
        path = find_path(option, entries)
        if path not in entries:
            raise _describe_unknown(option, entries)
        # Numbers of numpy are no plain data, which a config holds.
        value = value.item() if isinstance(value, np.generic) else value
        # Lists come from JSON and notebooks; a config holds tuples.
        changes[path] = tuple(value) if isinstance(value, list) else value
    return rebuild(config, changes)


def _read_changes(config: Any, options: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the new values by path; raise a ConfigError with the errors of all options."""
    entries = {entry.path: entry for entry in walk(config)}
    changes: dict[str, Any] = {}
    # All errors at once, so that a command with three mistakes is not run three times.
    errors: list[str] = []
    for option, values in options.items():
        path = find_path(option, entries)
        try:
            if path not in entries:
                raise _describe_unknown(option, entries)
            if path != option and path in options:
                raise ConfigError(f"--{option} is short for --{path}: give one of them")
            changes[path] = _convert_value(entries[path], values)
        except ConfigError as error:
            errors.append(str(error))
    # Which of the two is meant cannot be known, and their order does not count.
    for path in changes:
        parent = path.rpartition(".")[0]
        while parent:
            if changes.get(parent, ...) is None:
                errors.append(f"--{parent} None turns off what --{path} sets")
            parent = parent.rpartition(".")[0]
    if errors:
        raise ConfigError("\nerror: ".join(errors))
    return changes


def _describe_unknown(option: str, entries: Mapping[str, ConfigEntry]) -> ConfigError:
    """Return the error for an unknown option, with the nearest valid ones."""
    for path, entry in entries.items():
        if entry.kind == "absent" and option.startswith(f"{path}."):
            return ConfigError(f"--{option}: {path} is {entry.absence} in this config; {_ABSENT}")
    near = _find_near(option, entries)
    known = _find_known(option, entries, near=near)
    if known:
        return ConfigError(f"--{option}: no such option; {describe_all(known)}")
    names = " or ".join(f"--{path}" for path in near)
    hint = f"did you mean {names}" if near else "--help lists all"
    return ConfigError(f"--{option}: no such option; {hint}")


def _find_known(
    option: str, entries: Mapping[str, ConfigEntry], *, near: Sequence[str]
) -> list[KnownName]:
    """Return the rows of an option of another trainer, unless it is nearer to one of ours."""
    known = find_exact(option)
    if not known:
        known = find_similar(option)
        if known and near:
            theirs, ours = (
                difflib.SequenceMatcher(None, option, name).ratio()
                for name in (known[0].theirs, near[0])
            )
            known = known if theirs > ours else ()
    # A server has no trainer whose option could be named.
    sections = {path for path in entries if "." not in path}
    return [row for row in known if row.fits(sections)]


def _find_near(option: str, entries: Mapping[str, ConfigEntry]) -> list[str]:
    """Return the options that an unknown one may stand for."""
    by_name: dict[str, list[str]] = {name: [name] for name in SOURCE_OPTIONS}
    for name, path in ALIASES.items():
        if path in entries and "." not in option:
            by_name.setdefault(name, []).append(name)
    for path, entry in entries.items():
        if entry.kind == "leaf":
            by_name.setdefault(entry.name, []).append(path)

    # Paths share so much that every neighbour of the intended option is close: the name must be
    # close too.
    parent, _, name = option.rpartition(".")
    paths: list[str] = []
    for close in difflib.get_close_matches(name, by_name, n=3):
        paths += by_name[close]
    near = difflib.get_close_matches(option, paths, n=3, cutoff=0.0)
    near = [path for path in near if find_short_name(path) not in near]
    if near or not parent:
        return near
    return [path for path in entries if path.rpartition(".")[0] == parent]


def _convert_value(entry: ConfigEntry, values: list[str]) -> Any:
    """Return the value of an option, converted to the field's type."""
    if entry.kind == "hidden":
        raise ConfigError(
            f"--{entry.path}: holds code, which a registry function sets; not an option"
        )
    if entry.kind in ("node", "absent"):
        if entry.optional and values == ["None"]:
            return None
        raise _describe_component(entry)
    # tyro takes only True and False; --overwrite alone means True.
    if describe_type(entry.annotation) in ("bool", "bool | None"):
        values = list(map(str.capitalize, values)) or ["True"]

    holder = dataclasses.make_dataclass("Holder", [("value", entry.annotation)])
    # One value is joined by "=", so that it may start with a dash.
    args = [f"--value={values[0]}"] if len(values) == 1 else ["--value", *values]
    try:
        # tyro's message names the holder, not the field.
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(holder, args=args, config=(tyro.conf.FlagConversionOff,)).value
    except SystemExit:
        given = " ".join(values) or "nothing"
        raise ConfigError(
            f"--{entry.path}: {given!r} is not of type {describe_type(entry.annotation)}"
        ) from None


def _describe_component(entry: ConfigEntry) -> ConfigError:
    """Return the error for a value that is given to a component instead of to a field."""
    if entry.kind == "absent":
        return ConfigError(f"--{entry.path}: is {entry.absence} in this config; {_ABSENT}")
    children = list_children(entry.value, prefix=f"{entry.path}.")
    fields = ", ".join(f"--{child.path}" for child in children)
    off = f"; --{entry.path} None turns it off" if entry.optional else ""
    return ConfigError(f"--{entry.path}: has fields of its own: {fields}{off}")
