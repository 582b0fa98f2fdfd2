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
import textwrap
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import tyro

from rl.config.json import LOCATION, encode, read_json
from rl.config.known_names import find
from rl.config.registry import (
    ExplainableComponent,
    ExplanationForm,
    RootComponent,
    RunRequest,
    resolve,
)
from rl.config.tree import ConfigEntry, ConfigError, describe_type, list_children, rebuild, walk
from rl.utils.caches import ensure_private_caches
from rl.utils.errors import RunError
from rl.utils.namespaces import enter_user_namespace
from rl.utils.printing import print_error, print_text
from rl.utils.processes import disable_collections
from rl.utils.proxies import allow_loopback

SOURCE_OPTIONS = {
    "module": "Registry module: a name in `configs/` or an importable dotted module.",
    "config": "Function of that module that returns the config.",
    "from_json": "Start from a run's config.json instead of --module and --config, under a new "
    "name and without its permission to overwrite. Runs code: imports the module that the file "
    "names.",
    "resume": "Continue the run of this folder with its config.json; options change fields of it. "
    "Runs code: imports the module that the file names.",
    "explain": (
        "Show as text or json what the run would be, and which options are refused; start nothing."
    ),
}
USES_NETWORK = re.compile(r"launch\.(isolate_network [Ff]alse|hosts (slurm|kubernetes))")
"""Options with which the actors get no network namespace (`actors.launch.isolation`)."""
WIDTH = 110
"""Columns of `--help`."""
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
    # The order counts. A namespace shows root's folders as nobody's, so that caches come before; a
    # process with threads, which the config's module may start, cannot enter it.
    allow_loopback()
    ensure_private_caches()
    if not USES_NETWORK.search(" ".join(argv).replace("=", " ")):
        enter_user_namespace()
    with nullcontext() if early is None else early(argv):
        return _run(argv, default_module=default_module, default_config=default_config, prog=prog)


def _run(argv: Sequence[str], *, default_module: str, default_config: str, prog: str) -> int:
    # The config's module imports everything that the run needs: many objects, none of them garbage.
    with disable_collections():
        request = parse_cli(
            argv,
            default_module=default_module,
            default_config=default_config,
            prog=prog,
        )

    try:
        # The root of a training run is `actors.controller.Controller`. It is not made by
        # `config.build`, which would judge the config again: nothing has touched the config since.
        root: type[RootComponent] = request.config.owner
        if request.explain is None:
            root(config=request.config, request=request).run()
            return 0
        if not issubclass(root, ExplainableComponent):
            raise ValueError(f"--explain: {request.origin} is not a training run")
        return root(config=request.config, request=request).explain(request.explain)
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    except RunError as error:
        print_error(f"error: the run stopped: {error}")
        return 1
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        return 130


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
        options, wants_help = _split(argv)
        request, changes = _find_request(
            options, default_module=default_module, default_config=default_config
        )
        # The config is judged once, with everything that the command line changes.
        changes |= _read_changes(request.config, options)
        request = dataclasses.replace(request, config=rebuild(request.config, changes))
    except ConfigError as error:
        print_error(f"error: {error}")
        raise SystemExit(2) from None
    if wants_help:
        _print_help(request, prog=prog)
    return request


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], bool]:
    """Return the values by option name (with underscores), of which the last wins, and True for
    --help.
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
        elif values is None:
            raise ConfigError(f"{token!r} belongs to no option; options are written --name value")
        else:
            values.append(token)
    return options, options.pop("help", None) is not None


def _find_request(
    options: dict[str, list[str]], *, default_module: str, default_config: str | None
) -> tuple[RunRequest, dict[str, Any]]:
    """Return the run without its overrides, and the values by path that its origin changes.

    Removes the options of `SOURCE_OPTIONS`.
    """
    given = _take_source_options(options)
    explain: Any = given.pop("explain", None)
    if explain is not None and explain not in (forms := typing.get_args(ExplanationForm)):
        raise ConfigError(f"--explain {explain}: must be {' or '.join(forms)}, or nothing")
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
        request = resolve(
            given.get("module", default_module), given.get("config", default_config or "")
        )

    # Such a field could never be set: the option is taken before the config is known.
    clash = _name_fields(request.config) & {*SOURCE_OPTIONS, "help"}
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
    location = {"name": path.name, "dump_folder": dump_folder, "overwrite": False}
    return dataclasses.replace(request, resumes=path), location


def _read_changes(config: Any, options: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the new values by path; raise a ConfigError with the errors of all options."""
    entries = {entry.path: entry for entry in walk(config)}
    changes: dict[str, Any] = {}
    # All errors at once, so that a command with three mistakes is not run three times.
    errors: list[str] = []
    for option, values in options.items():
        try:
            if option not in entries:
                raise _describe_unknown(option, entries)
            changes[option] = _convert_value(entries[option], values)
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
    if (known := find(option)) is not None:
        return ConfigError(f"--{option}: no such option; {known.describe()}")
    near = [f"--{path}" for path in _find_near(option, entries)]
    hint = f"did you mean {' or '.join(near)}" if near else "--help lists all"
    return ConfigError(f"--{option}: no such option; {hint}")


def _find_near(option: str, entries: Mapping[str, ConfigEntry]) -> list[str]:
    """Return the options that an unknown one may stand for."""
    by_name: dict[str, list[str]] = {name: [name] for name in SOURCE_OPTIONS}
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


def _print_help(request: RunRequest, *, prog: str | None) -> NoReturn:
    """Print all options and exit."""
    try:
        print_text("\n".join(_describe_options(request, prog=prog)))
    except ValueError as error:
        print_error(f"error: {error}")
        raise SystemExit(2) from None
    raise SystemExit(0)


def _describe_options(request: RunRequest, *, prog: str | None) -> Iterator[str]:
    yield (
        f"usage: {prog} [--option value ...]\n\n{request.origin}: "
        f"{type(request.config).__qualname__}. Defaults are those of this config; choose another "
        "with --module and --config.\n"
    )
    for name, text in SOURCE_OPTIONS.items():
        yield from _describe_option(name, "str", text)
    for entry in walk(request.config):
        if entry.kind == "leaf":
            default = f"{entry.doc} (default: {encode(entry.value)!r})".strip()
            yield from _describe_option(entry.path, describe_type(entry.annotation), default)
        elif entry.kind in ("node", "absent") and entry.optional:
            state = "None in this config" if entry.value is None else "None turns it off"
            yield from _describe_option(entry.path, "None", f"{entry.doc} ({state})".strip())


def _describe_option(path: str, values: str, text: str) -> Iterator[str]:
    yield f"--{path} {values}"
    yield textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
