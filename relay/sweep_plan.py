"""Runs of a sweep: the options of each, their names, and the record of a sweep that was started.

    parse_over("lr=1e-5,3e-5")             # ("lr", ("1e-5", "3e-5"))
    parse_over("betas=0.9 0.95,0.8 0.9")   # commas between values, spaces within a tuple

A sweep writes `outputs/<name>.sweep.json`, so that the same command goes on with it later, and a
command with other options does not take its runs for its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.utils.files import read_json_object, replace_file

NOT_SWEPT = ("name", "dump_folder", "overwrite", "resume", "from_json", "explain", "help")
"""Options that a sweep sets itself, or that start no run."""
MAX_NAME = 120
"""Characters of a run's name; a longer one ends in a digest."""
SUFFIX = ".sweep.json"

Options = Mapping[str, tuple[str, ...]]
"""Values by option, as on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    name: str
    options: Options
    """The options that differ between the runs."""

    def list_arguments(self) -> list[str]:
        """Return the options as arguments of `relay train`."""
        arguments: list[str] = []
        for option, values in self.options.items():
            # A value may begin with a dash.
            if len(values) == 1:
                arguments.append(f"--{option}={values[0]}")
            else:
                arguments += [f"--{option}", *values]
        return arguments


# What the user typed


def parse_over(text: str) -> tuple[str, tuple[str, ...]]:
    """Return option and values of `option=value,value`; raise ValueError for anything else."""
    option, equals, rest = text.partition("=")
    option = _clean_option(option)
    if not equals or not option:
        raise ValueError(f"--over {text}: must be OPTION=VALUE,VALUE,..., such as lr=1e-5,3e-5")
    values = tuple(rest.split(","))
    if not all(value.strip() for value in values):
        raise ValueError(
            f"--over {text}: a value is empty; values that hold a comma belong into --list"
        )
    return option, values


def make_grid(over: Iterable[tuple[str, tuple[str, ...]]]) -> list[Options]:
    """Return every combination of the values, the last option changing fastest."""
    values_of: dict[str, tuple[str, ...]] = {}
    for option, values in over:
        if option in values_of:
            raise ValueError(f"--over {option}: is given twice; write all its values in one")
        values_of[option] = values
    grid: list[Options] = []
    for values in itertools.product(*values_of.values()):
        # Spaces separate the elements of a tuple, as on the command line; quotes keep them.
        split = [tuple(_split_value(value)) for value in values]
        grid.append(dict(zip(values_of, split, strict=True)))
    return grid


def _split_value(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"--over ...{value}: {error}") from error


def read_list(file: Path) -> list[Options]:
    """Return the option sets of a JSON file: a list of objects of options and values."""
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"--list {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--list {file}: is not JSON: {error}") from error
    if not isinstance(content, list) or not content:
        raise ValueError(f'--list {file}: must hold a list of objects, such as [{{"lr": 1e-5}}]')
    sets: list[Options] = []
    for number, item in enumerate(content, start=1):
        if not isinstance(item, dict) or not item:
            raise ValueError(f"--list {file}: entry {number} is no object of options and values")
        sets.append({_clean_option(name): _list_values(value) for name, value in item.items()})
    return sets


def _list_values(value: Any) -> tuple[str, ...]:
    return tuple(map(_write_value, value if isinstance(value, list) else [value]))


def _write_value(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ValueError(f"--list: {value!r} is no value of an option")
    # Text and None as they are, True as True, and a float as JSON has it.
    return json.dumps(value) if isinstance(value, float) else str(value)


def _clean_option(name: str) -> str:
    return name.strip().removeprefix("--").replace("-", "_")


# The runs


def plan_runs(sweep: str, option_sets: Sequence[Options]) -> list[PlannedRun]:
    """Return the runs with their names; raise ValueError for options that no sweep can have."""
    if not re.fullmatch(r"[\w.+-]+", sweep) or sweep.startswith((".", "-")):
        raise ValueError(
            f"--name {sweep}: must be letters, digits, _, -, + and ., as it begins names of folders"
        )
    for options in option_sets:
        for option in options:
            if option in NOT_SWEPT:
                raise ValueError(f"{option}: a sweep cannot have several values of it")
    # The names are the same whenever the sweep is started again, so that it finds its runs.
    parts = _choose_parts(option_sets)
    names = [_name_run(sweep, options, parts) for options in option_sets]
    counts = Counter(names)
    runs: dict[str, PlannedRun] = {}
    for name, options in zip(names, option_sets, strict=True):
        # Values that differ in characters that no folder should have, such as a/b and a_b.
        if counts[name] > 1 or len(name) > MAX_NAME:
            name = f"{name[: MAX_NAME - 8]}-{_digest(options)}"
        runs[name] = PlannedRun(name=name, options=options)
    if len(runs) < len(option_sets):
        raise ValueError("two runs of the sweep have the same options")
    return list(runs.values())


def _choose_parts(option_sets: Iterable[Options]) -> dict[str, str]:
    """Return the part of each option that names show: its last, or all if two have the same."""
    options = dict.fromkeys(itertools.chain.from_iterable(option_sets))
    lasts = Counter(option.rpartition(".")[2] for option in options)
    parts = {}
    for option in options:
        last = option.rpartition(".")[2]
        parts[option] = last if lasts[last] == 1 else option
    return parts


def _name_run(sweep: str, options: Options, parts: Mapping[str, str]) -> str:
    words = [sweep]
    for option, values in options.items():
        value = re.sub(r"[^\w.+-]+", "_", "_".join(values)).strip("_") or "empty"
        words.append(f"{parts[option]}_{value}")
    return "-".join(words)


def _digest(options: Options) -> str:
    return hashlib.sha256(json.dumps(dict(options)).encode()).hexdigest()[:7]


# The record


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """Options and runs of a sweep, in a file beside its runs."""

    common: tuple[str, ...]
    """Arguments of `relay train` that all runs have."""
    names: tuple[str, ...]
    """Names of the runs."""


def read_record(file: Path) -> SweepRecord | None:
    """Return the record of a sweep; None if there is none. Raises ValueError if it is damaged."""
    if not file.exists():
        return None
    content = read_json_object(file)
    try:
        return SweepRecord(
            common=tuple(map(str, content["options"])), names=tuple(map(str, content["runs"]))
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the record of a sweep; choose another --name") from error


def write_record(file: Path, record: SweepRecord) -> None:
    """Write the record of a sweep; raise ValueError if that is impossible."""
    content = {"options": record.common, "runs": record.names}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from error
