"""The command line of a run: `--module NAME --config FUNCTION --trainer.optimizer.lr 1e-4`.

The registry function returns a complete config; every leaf of *that instance* is an option,
so fields that a subclass adds in a nested place are options too. An option is checked against
the instance's tree before its value is typed by tyro, hence a typo can never become a default.
`--from_json outputs/x/config.json` starts from a run's file instead, without what was that run's
alone (`ONE_RUN`); options override it. `--resume outputs/x` goes on with that run in its own folder.
`--explain` asks for what the run would be, instead of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from rl.config.registry import ExplanationForm, ResolvedRun, resolve
from rl.config.serialize import read_json
from rl.config.tree import ConfigError, Entry, children, rebuild, type_name, walk

SOURCE_OPTIONS = {
    "module": "Registry module: a name in `configs/` or an importable dotted module.",
    "config": "Function of that module that returns the config.",
    "from_json": "Start from a run's config.json instead of --module and --config; under a new name, and "
    "without its leave to overwrite.",
    "resume": "Go on with the run of this folder, in it, with its config.json; options change fields of it.",
}
EXPLAIN = "explain"
FORMS: tuple[ExplanationForm, ...] = typing.get_args(ExplanationForm)
_OF_THE_FOLDER = ("name", "dump_folder", "overwrite")
"""Fields that a run which goes on has from its folder's place."""


def parse_cli(
    argv: Sequence[str], *, default_module: str, default_config: str | None = None, prog: str | None = None
) -> ResolvedRun:
    """The run that a command line describes.

    Args:
        argv: Without the program's name.
        default_module: Registry module where `--module` is not given.
        default_config: Its function where `--config` is not given; None asks for `--config`.
        prog: The program's name in `--help`.

    Raises:
        SystemExit: 2 after an error on stderr that names what is wrong and what is valid, of each option with
            `--explain`; 0 after `--help`.
    """
    try:
        options, wants_help = _split(argv)
        explain = _form_of_explanation(options.pop(EXPLAIN, None))
        run = _source(options, default_module=default_module, default_config=default_config)
        run = dataclasses.replace(_with_options(run, options, tells_all=explain is not None), explain=explain)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if wants_help:
        _print_help(run, prog=prog)
    return run


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], bool]:
    """Values by option name (underscores, no dashes), and whether help is asked for; a repeat replaces."""
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for token in argv:
        if token == "-h":
            values = options["help"] = []
        elif token.startswith("--") and token != "--":
            name, equals, value = token[2:].partition("=")
            values = options[name.replace("-", "_")] = [value] if equals else []
        elif values is None:
            raise ConfigError(f"{token!r} belongs to no option; options are written --name value")
        else:
            values.append(token)
    return options, options.pop("help", None) is not None


def _source(options: dict[str, list[str]], *, default_module: str, default_config: str | None) -> ResolvedRun:
    """The run before overrides; takes its options out of `options`."""
    given = {}
    for name in SOURCE_OPTIONS:
        if (values := options.pop(name, None)) is not None:
            if len(values) != 1:
                raise ConfigError(f"--{name} takes one value, not {values!r}")
            given[name] = values[0]
    if "resume" in given:
        return _resumed(Path(given.pop("resume")), beside=[*given, *options])
    if "from_json" in given:
        if len(given) > 1:
            raise ConfigError(
                "--from_json names its module and config itself: leave out --module and --config"
            )
        file = Path(given["from_json"])
        run = read_json(file)
        return dataclasses.replace(run, config=_of_another_run(run.config), file=file)
    # An empty name finds nothing, so the error lists what the module has.
    run = resolve(given.get("module", default_module), given.get("config", default_config or ""))
    if clash := {entry.name for entry in children(run.config)} & {*SOURCE_OPTIONS, EXPLAIN, "help"}:
        raise TypeError(f"{type(run.config).__qualname__} has fields named like options: {sorted(clash)}")
    return run


def _resumed(folder: Path, *, beside: Sequence[str]) -> ResolvedRun:
    """The run of a folder; `beside` are the other options that were given."""
    for name in beside:
        root = name.removeprefix("no_")
        if name in SOURCE_OPTIONS or root in _OF_THE_FOLDER:
            raise ConfigError(
                f"--resume goes on with a run as it is, in its own folder: leave out --{name}; other options "
                "change fields of its config.json"
            )
    path = folder.expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"--resume {folder}: there is no such folder")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"--resume {folder}: not the folder of a run: it has no config.json")
    run = read_json(file)
    if not set(_OF_THE_FOLDER) <= {entry.name for entry in children(run.config)}:
        raise ConfigError(
            f"--resume {folder}: {run.module}.{run.function} is no training run, so it has no steps to go on "
            "with"
        )
    dump_folder = type(run.config.dump_folder)(path.parent)  # a text or a path
    places = {"name": path.name, "dump_folder": dump_folder, "overwrite": False}
    return dataclasses.replace(run, config=rebuild(run.config, places), resumes=path, file=file)


def _of_another_run(config: Any) -> Any:
    """A copy with the fields marked `ONE_RUN` at their defaults."""
    fields = [f for f in dataclasses.fields(config) if f.metadata.get("one_run")]
    return rebuild(config, {f.name: f.default for f in fields})


def _with_options(run: ResolvedRun, options: Mapping[str, list[str]], *, tells_all: bool) -> ResolvedRun:
    """The run with its config changed as the options say.

    Raises:
        ConfigError: the first fault, or with `tells_all` one of each component that the options set wrongly.
    """
    try:
        changes = _changes(run.config, options)
        config = rebuild(run.config, changes)
    except ConfigError:
        if tells_all and (faults := _faults(run.config, options)):
            raise ConfigError("\nerror: ".join(faults)) from None
        raise
    return dataclasses.replace(run, config=config, options=tuple(changes))


def _faults(config: Any, options: Mapping[str, list[str]]) -> list[str]:
    """What is wrong with each option by itself, and with those of a component together."""
    faults: list[str] = []
    changes: dict[str, Any] = {}
    for option, values in options.items():
        try:
            changes |= _changes(config, {option: values})
        except ConfigError as error:
            faults.append(str(error))
    while changes:
        try:
            rebuild(config, changes)
            break
        except ConfigError as error:
            faults.append(str(error))
            # Inner components are made first. One that is wrong is left out as a whole: without some of its
            # options others might be wrong that are not.
            inside = _component(str(error), changes)
            changes = {path: value for path, value in changes.items() if not path.startswith(inside)}
    return faults


def _component(message: str, paths: Iterable[str]) -> str:
    """The beginning of the paths of what a message is of, which starts with its name; empty for the root."""
    parents = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    return max((f"{p}." for p in parents if message.startswith((f"{p}.", f"{p}:"))), key=len, default="")


def _changes(config: Any, options: Mapping[str, list[str]]) -> dict[str, Any]:
    """The new values, by path."""
    entries = {entry.path: entry for entry in walk(config)}
    changes: dict[str, Any] = {}
    for option, values in options.items():
        entry = entries.get(option)
        if entry is None and not values and (negated := _negated(option, entries)):
            changes[negated.path] = False
        elif entry is None:
            _unknown(option, entries)
        else:
            changes[entry.path] = _value(entry, values)
    for path, value in changes.items():
        if value is None and (inner := next((p for p in changes if p.startswith(f"{path}.")), None)):
            raise ConfigError(f"--{path} None turns off what --{inner} sets")
    return changes


def _form_of_explanation(values: list[str] | None) -> ExplanationForm | None:
    """None where none is asked for."""
    if values is None:
        return None
    for form in FORMS:
        if values in ([], [form]):
            return form
    raise ConfigError(f"--{EXPLAIN} {' '.join(values)}: must be {' or '.join(FORMS)}, or nothing")


def _negated(option: str, entries: dict[str, Entry]) -> Entry | None:
    """The boolean that `--no_a.b` or `--a.no_b` turns off."""
    parent, dot, name = option.rpartition(".")
    for path in (option.removeprefix("no_"), f"{parent}{dot}{name.removeprefix('no_')}"):
        if path != option and path in entries and _is_bool(entries[path]):
            return entries[path]
    return None


def _unknown(option: str, entries: dict[str, Entry]) -> NoReturn:
    for path, entry in entries.items():
        if entry.kind == "absent" and option.startswith(f"{path}."):
            raise ConfigError(
                f"--{option}: {path} is {_absence(entry)} in this config; a registry function can turn it on"
            )
    leaves = [path for path, entry in entries.items() if entry.kind == "leaf"]
    leaves += [*SOURCE_OPTIONS, EXPLAIN]
    name = option.rpartition(".")[2]
    near = [path for path in leaves if path.rpartition(".")[2] == name][:3]
    # Paths share so much that any field beside the meant one looks close: its name must be close too.
    near += [
        path
        for path in difflib.get_close_matches(option, leaves, n=3)
        if path not in near and difflib.get_close_matches(name, [path.rpartition(".")[2]])
    ]
    names = {path.rpartition(".")[2]: path for path in leaves}
    near = near or [names[match] for match in difflib.get_close_matches(name, names, n=3)]
    parent = option.rpartition(".")[0]
    siblings = [path for path in leaves if parent and path.rpartition(".")[0] == parent]
    if near:
        hint = "did you mean " + " or ".join(f"--{path}" for path in near)
    elif siblings:
        hint = f"{parent} has " + ", ".join(f"--{path}" for path in siblings)
    else:
        hint = "--help lists all"
    raise ConfigError(f"--{option}: no such option; {hint}")


def _value(entry: Entry, values: list[str]) -> Any:
    if entry.kind == "hidden":
        raise ConfigError(f"--{entry.path}: holds code, which a registry function sets; not an option")
    if entry.kind in ("node", "absent"):
        if entry.optional and values == ["None"]:
            return None
        if entry.kind == "absent":
            raise ConfigError(
                f"--{entry.path}: is {_absence(entry)} in this config; a registry function can turn it on"
            )
        fields = ", ".join(f"--{child.path}" for child in children(entry.value, prefix=f"{entry.path}."))
        off = f"; --{entry.path} None turns it off" if entry.optional else ""
        raise ConfigError(f"--{entry.path}: has fields of its own: {fields}{off}")
    if _is_bool(entry):
        values = [value.capitalize() for value in values] or ["True"]
    return _typed(entry, values)


def _absence(entry: Entry) -> str:
    return "None" if entry.value is None else "empty"


def _is_bool(entry: Entry) -> bool:
    return entry.kind == "leaf" and type_name(entry.annotation) in ("bool", "bool | None")


def _typed(entry: Entry, values: list[str]) -> Any:
    holder = dataclasses.make_dataclass("Holder", [("value", entry.annotation)])
    # One value is joined by "=", so that it may start with a dash.
    args = [f"--value={values[0]}"] if len(values) == 1 else ["--value", *values]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's message names our holder, not the field
            return tyro.cli(holder, args=args, config=(tyro.conf.FlagConversionOff,)).value
    except SystemExit:
        given = " ".join(values) or "nothing"
        raise ConfigError(f"--{entry.path}: {given!r} is not of type {type_name(entry.annotation)}") from None


def _print_help(run: ResolvedRun, *, prog: str | None) -> NoReturn:
    description = (
        f"{run.module}.{run.function}: {type(run.config).__qualname__}. Defaults are those of this config; "
        "choose another with --module and --config."
    )
    sources = [
        (name, Annotated[str | None, tyro.conf.arg(help=text)], dataclasses.field(default=default))
        for (name, text), default in zip(
            SOURCE_OPTIONS.items(), (run.module, run.function, None, None), strict=True
        )
    ]
    explain = tyro.conf.arg(help="Show what the run would be, and what is refused of it; start nothing.")
    sources.append((EXPLAIN, Annotated[ExplanationForm | None, explain], dataclasses.field(default=None)))
    mirror = dataclasses.make_dataclass("Options", [*sources, *_mirror_fields(run.config, prefix="")])
    tyro.cli(
        mirror,
        args=["--help"],
        prog=prog,
        description=description,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )
    raise AssertionError("tyro returned from --help")


def _mirror_fields(node: Any, *, prefix: str) -> list[tuple[str, Any, Any]]:
    """Fields for a dataclass with the shape of `node`, without what no option can set, which tyro prints the
    help of."""
    fields = []
    for entry in children(node, prefix=prefix):
        annotation, doc, value = entry.annotation, entry.doc, entry.value
        if entry.kind == "hidden" or (entry.kind == "absent" and value is not None):
            continue
        if entry.kind == "node":
            annotation = value = dataclasses.make_dataclass(
                type(entry.value).__name__, _mirror_fields(entry.value, prefix=f"{entry.path}.")
            )
            doc += f" `--{entry.path} None` turns it off." if entry.optional else ""
        elif entry.kind == "absent":
            annotation = type(None)
        argument = tyro.conf.arg(name=entry.name, help=doc)
        # A mirrored class is its own factory; `value=value` because the loop rebinds the name.
        factory = value if entry.kind == "node" else lambda value=value: value
        fields.append(
            (
                f"field_{entry.name}",
                Annotated[annotation, argument],
                dataclasses.field(default_factory=factory),
            )
        )
    return fields
