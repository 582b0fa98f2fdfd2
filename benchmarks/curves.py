"""Learning curves on a CPU: reverse-text and alphabet-sort, each with a control whose reward is
noise.

    python -m benchmarks.curves [--quick] [--seeds 0 1] [--dump_folder outputs/curves]

Whole runs with warm-up, one after another: `tiny` of each task for each seed, and `tiny_noise` for
the first seed (`--controls`: for each). All runs are evaluated greedily on held-out problems. The
rewards of a control are coin tosses, so its share of right answers, `correct`, must stay flat. The
last line is a JSON object with all evaluations. The exit status is 1 if a reward rose by less than
0.2 or a control's `correct` moved by more than
0.05.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import whole_run

TASKS = ("reverse_text", "alphabet_sort")
RUN_TIMEOUT_S = 900.0
MIN_RISE = 0.2
"""Smallest rise of the evaluation reward in a run that learns."""
MAX_DRIFT = 0.05
"""Largest change of the share of right answers in a control."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first seed alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--controls", action="store_true", help="a control for every seed, not the first alone"
    )
    parser.add_argument(
        "--dump_folder", help="where the runs stay; default: they are removed again"
    )
    args = parser.parse_args()
    seeds = args.seeds[:1] if args.quick else args.seeds
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.dump_folder or temporary).absolute()
        curves = [
            _measured(folder, task=task, config=config, seed=seed)
            for task in TASKS
            for config, seed in runs(seeds, controls=args.controls)
        ]
    print(table(curves))
    print(json.dumps({"benchmark": "curves", "load_before": round(load, 2), "curves": curves}))
    if missed := shortfalls(curves):
        sys.exit("\n".join(missed))


def runs(seeds: Sequence[int], *, controls: bool) -> list[tuple[str, int]]:
    """Return config and seed of each run of a task; with `controls`, a control for every seed."""
    return [
        *(("tiny", seed) for seed in seeds),
        *(("tiny_noise", seed) for seed in (seeds if controls else seeds[:1])),
    ]


def shortfalls(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each run that did not learn and for each control that did."""
    missed = []
    for made in curves:
        run = f"{made['task']}, {made['config']}, seed {made['seed']}"
        if made["config"] == "tiny_noise":
            if abs(made["correct_rose"]) > MAX_DRIFT:
                missed.append(
                    f"{run}: correct moved by {made['correct_rose']:+}, at most {MAX_DRIFT} is "
                    "noise"
                )
        elif made["reward_rose"] < MIN_RISE:
            missed.append(
                f"{run}: the reward rose by {made['reward_rose']:+}, should by {MIN_RISE}"
            )
    return missed


def _measured(folder: Path, *, task: str, config: str, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    records = whole_run(
        folder, f"{task}-{config}-{seed}", "--module", task, "--config", config, "--seed",
        str(seed),
        "--overwrite", timeout_s=RUN_TIMEOUT_S,
    )  # fmt: skip
    run = {
        "task": task,
        "config": config,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    made = run | curve(records)
    print(
        f"{task}, {config}, seed {seed}: correct {made['correct']} in {made['seconds']} s",
        flush=True,
    )
    return made


def curve(records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the evaluations of a run in order, and the rise of the share of right answers and of
    the reward.

    Raises:
        ValueError: an evaluation before or after the first step is missing.
    """
    evaluations = [r for r in records if "eval/correct" in r]
    if len(evaluations) < 2 or evaluations[0]["step"]:
        steps = [r["step"] for r in evaluations]
        raise ValueError(f"evaluated at steps {steps}: must be at 0 and at a later one")
    correct = [round(r["eval/correct"], 4) for r in evaluations]
    reward = [round(r["eval/reward"], 4) for r in evaluations]
    return {
        "steps": [round(r["step"]) for r in evaluations],
        "correct": correct,
        "reward": reward,
        "correct_rose": round(correct[-1] - correct[0], 4),
        "reward_rose": round(reward[-1] - reward[0], 4),
    }


def table(curves: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the first and last share of right answers and reward of each run."""
    lines = [
        "| task | config | seed | steps | correct | reward | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for made in curves:
        ends = [f"{made[name][0]:.3f} -> {made[name][-1]:.3f}" for name in ("correct", "reward")]
        said = [
            made["task"],
            made["config"],
            made["seed"],
            made["steps"][-1],
            *ends,
            made["seconds"],
        ]
        lines.append(f"| {' | '.join(map(str, said))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
