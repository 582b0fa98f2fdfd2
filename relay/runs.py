"""Table of runs: `relay runs [FOLDER ...]`, by default of the runs below outputs/.

Exit status: 0, also if there are no runs; 2 for a folder that does not exist.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relay.run_table import RunSummary, find_runs, format_table, summarize_run
from rl.utils.printing import print_error, print_text

DEFAULT_FOLDER = "outputs"
ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.name,
    "task": lambda run: run.task,
    "state": lambda run: run.state,
    "steps": lambda run: run.num_done,
    "eval": lambda run: run.last_evaluation,
    "reward": lambda run: run.last_reward,
    "time": lambda run: run.duration_s,
    "started": lambda run: run.started_s,
}
TEXTS = ("name", "task", "state")
"""Orders that begin with the smallest; the others begin with the largest value."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status."""
    options = _parse(argv)
    summaries: list[RunSummary] = []
    seen: set[Path] = set()
    for folder in map(Path, options.folders or [DEFAULT_FOLDER]):
        folder = folder.expanduser()
        if not folder.is_dir() and options.folders:
            print_error(f"error: {folder}: there is no such folder")
            return 2
        for run in find_runs(folder):
            # Two folders of the command may hold the same run.
            place = run.resolve()
            if place not in seen:
                seen.add(place)
                summaries.append(summarize_run(run, base=folder))
    summaries = sort_runs(summaries, by=options.sort)
    try:
        if options.json:
            # Numbers that are not finite are no JSON.
            rows = [_drop_infinite(run.to_dict()) for run in summaries]
            print_text(json.dumps(rows, indent=2))
        elif summaries:
            print_text(format_table(summaries))
        else:
            folders = ", ".join(options.folders or [f"{DEFAULT_FOLDER}/"])
            print_text(f"there are no runs in {folders}; `relay train` starts one")
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    return 0


def sort_runs(runs: Sequence[RunSummary], *, by: str) -> list[RunSummary]:
    """Return the runs in an order of `ORDERS`; those without the value come last."""
    value_of = ORDERS[by]
    known: list[RunSummary] = []
    unknown: list[RunSummary] = []
    for run in sorted(runs, key=lambda run: run.name):
        value = value_of(run)
        is_known = value is not None and not (isinstance(value, float) and math.isnan(value))
        (known if is_known else unknown).append(run)
    return sorted(known, key=value_of, reverse=by not in TEXTS) + unknown


def _drop_infinite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with None for numbers that are not finite."""
    finite = {}
    for name, value in values.items():
        is_bad = isinstance(value, float) and not math.isfinite(value)
        finite[name] = None if is_bad else value
    return finite


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relay runs", description="List runs in a table.")
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help=f"folder of a run, or a folder that is searched for runs; default: {DEFAULT_FOLDER}",
    )
    parser.add_argument(
        "--sort",
        choices=sorted(ORDERS),
        default="started",
        help="order of the runs: texts from A to Z, numbers from the largest; default: started",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects instead")
    return parser.parse_args(argv)
