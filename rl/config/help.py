"""Help of a command line: the options that people set, or all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NoReturn

from rl.config.common_options import GROUPS, find_short_name
from rl.config.json import encode
from rl.config.registry import RunRequest
from rl.config.tree import ConfigEntry, describe_type, walk
from rl.utils.printing import print_error, print_text

SOURCE_OPTIONS = {
    "module": "Registry module: a name in `configs/` or an importable dotted module.",
    "config": "Function of that module that returns the config.",
    "from_json": "Start from a run's config.json instead of --module and --config, under a new "
    "name and without its permission to overwrite. Runs code: imports the module that the file "
    "names.",
    "resume": "Continue the run of this folder with its config.json; options change fields of it. "
    "Runs code: imports the module that the file names.",
    "explain": (
        "Show in twelve lines what the run would be and what is refused, and start nothing; full "
        "and json show everything. Status 2 if it could not start here."
    ),
}
WIDTH = 110
"""Columns of `--help`."""
MIN_COMMON = 10
"""Fewest common options of a training run; a config with fewer is another program's."""


def print_help(request: RunRequest, *, prog: str | None, with_all: bool) -> NoReturn:
    """Print the options and exit."""
    try:
        print_text("\n".join(_describe_options(request, prog=prog, with_all=with_all)))
    except ValueError as error:
        print_error(f"error: {error}")
        raise SystemExit(2) from None
    raise SystemExit(0)


def _describe_options(request: RunRequest, *, prog: str | None, with_all: bool) -> Iterator[str]:
    config: Any = request.config
    yield (
        f"usage: {prog} [--option value ...]\n\n{request.origin}: "
        f"{type(config).__qualname__}. Defaults are those of this config; choose another "
        "with --module and --config.\n"
    )
    entries = {entry.path: entry for entry in walk(config)}
    num_common = sum(path in entries for paths in GROUPS.values() for path in paths)
    if not with_all and num_common >= MIN_COMMON:
        yield from _describe_common(entries)
        num_leaves = sum(entry.kind == "leaf" for entry in entries.values())
        yield f"--help-all shows all {num_leaves} options."
        return
    for name, text in SOURCE_OPTIONS.items():
        yield from _describe_option(name, "str", text)
    for entry in entries.values():
        yield from _describe_entry(entry)


def _describe_common(entries: dict[str, ConfigEntry]) -> Iterator[str]:
    """Yield the options of `GROUPS` that this config has, under their titles."""
    for title, paths in GROUPS.items():
        yield title
        for path in paths:
            if path in SOURCE_OPTIONS:
                yield from _describe_option(path, "str", SOURCE_OPTIONS[path])
            elif path in entries:
                yield from _describe_entry(entries[path])
        yield ""


def _describe_entry(entry: ConfigEntry) -> Iterator[str]:
    if entry.kind == "leaf":
        default = f"{entry.doc} (default: {encode(entry.value)!r})".strip()
        yield from _describe_option(entry.path, describe_type(entry.annotation), default)
    elif entry.kind in ("node", "absent") and entry.optional:
        state = "None in this config" if entry.value is None else "None turns it off"
        yield from _describe_option(entry.path, "None", f"{entry.doc} ({state})".strip())


def _describe_option(path: str, values: str, text: str) -> Iterator[str]:
    short = find_short_name(path)
    names = f"--{path}" if short is None else f"--{short}, --{path}"
    yield f"{names} {values}"
    yield textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
