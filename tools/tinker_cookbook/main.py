"""The cookbook's recipes, unmodified, against this project's server: `make tinker-cookbook`.

Makes what it needs (the cookbook's environment, a tiny base model), starts a server, runs the recipes one
after another and says of each promise whether it was kept. Exit status: 0 all were, 1 one was not, 2 what it
needs could not be had, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.interpreter import leave
from tools.setup.installer import InstallError
from tools.setup.python import Refusal
from tools.setup.state import find_site_packages
from tools.tinker_cookbook import environment
from tools.tinker_cookbook.checks import Evidence, Finding, values
from tools.tinker_cookbook.model import WarmStart, WarmStartError, make_base_model
from tools.tinker_cookbook.processes import ProcessError, log_end
from tools.tinker_cookbook.recipes import Place, Recipe, all_recipes, run
from tools.tinker_cookbook.serving import CACHE, ROOT, serving

EXAMPLE_DATA = Path("tinker_cookbook") / "example_data" / "conversations.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    recipe: str
    time_s: float
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each promise; a recipe's name and time stand in its first."""
    rows = [("recipe", "s", "promise", "kept", "seen")]
    for outcome in outcomes:
        for i, finding in enumerate(outcome.findings):
            head = (outcome.recipe, f"{outcome.time_s:.0f}") if i == 0 else ("", "")
            rows.append((*head, finding.promise, "yes" if finding.holds else "NO", finding.seen))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def step_time(evidence: Evidence) -> str:
    times = values(evidence.rows, "time/total")
    return f"{statistics.median(times):.1f} s a step" if times else "no step"


def try_recipe(recipe: Recipe, place: Place) -> Outcome:
    print(f"{recipe.name} ...", flush=True)
    started = time.monotonic()
    evidence = run(recipe, place)
    time_s = time.monotonic() - started
    outcome = Outcome(
        recipe=recipe.name, time_s=time_s, findings=tuple(check(evidence) for check in recipe.checks)
    )
    print(f"{recipe.name}: {time_s:.0f} s, {step_time(evidence)}, {'kept' if outcome.holds else 'NOT KEPT'}")
    if evidence.statuses[-1] != 0:
        number = len(evidence.statuses)
        print(log_end(place.folder / recipe.name / f"process-{number}.log"), flush=True)
    return outcome


def chosen(recipes: Sequence[Recipe], names: Sequence[str]) -> list[Recipe]:
    """Those of these names, all without any.

    Raises:
        ValueError: a name that no recipe has.
    """
    valid = [recipe.name for recipe in recipes]
    for name in names:
        if name not in valid:
            raise ValueError(f"--only {name}: must be of {', '.join(valid)}")
    return [recipe for recipe in recipes if not names or recipe.name in names]


def run_all(args: argparse.Namespace) -> int:
    """
    Raises:
        InstallError, Refusal, WarmStartError, ProcessError, ValueError: what could not be had.
    """
    python = environment.set_up(ROOT)
    site_packages = find_site_packages(ROOT / environment.FOLDER)
    assert site_packages is not None
    recipes = chosen(all_recipes(site_packages / EXAMPLE_DATA), args.only)
    model = make_base_model(CACHE, WarmStart(), say=lambda text: print(text, flush=True))
    folder = CACHE / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    with serving(folder) as server:
        print(f"server at {server.url}; everything is in {folder}", flush=True)
        place = Place(python=python, model=model, server=server, folder=folder, deadline_s=args.deadline_s)
        outcomes = [try_recipe(recipe, place) for recipe in recipes]
    print(f"\n{table(outcomes)}\n\n{time.monotonic() - started:.0f} s in all", flush=True)
    (folder / "results.json").write_text(
        json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8"
    )
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make tinker-cookbook", description="The cookbook's recipes against this project's server."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="RECIPE", help="by their names in the table")
    parser.add_argument("--deadline_s", type=float, default=600.0, help="of one recipe")
    args = parser.parse_args(argv)
    if not args.deadline_s > 0:
        parser.error(f"--deadline_s={args.deadline_s}: must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # An exception, so that the processes at work are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run_all(args)
    except (InstallError, Refusal, WarmStartError, ProcessError, ValueError) as error:
        print(f"tinker-cookbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntinker-cookbook: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    leave(main())
