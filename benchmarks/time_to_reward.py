"""Seconds of training until nine tenths are right: the synchronous loop against the asynchronous
one.

    python -m benchmarks.time_to_reward [--quick] [--seeds 0 1 2]

Whole runs of `tiny` and `tiny_async` on sum-digits, from the same warmed-up weights for each seed,
evaluated every few steps on 512 held-out problems. The clock counts steps without evaluations; the
sides alternate. The last line is a JSON object with medians over the seeds; `ratio` is synchronous
over asynchronous.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks.processes import open_runs_folder, prepare_start, whole_run

SIDES = {"sync": "tiny", "async": "tiny_async"}
GOAL = 0.9
"""Share of right greedy answers at which the clock stops."""
WHOLE = ("--loop.eval_every", "5")
QUICK = (
    "--trainer.optimizer.lr", "2e-4", "--trainer.lr_scheduler.warmup_steps", "4",
    "--loop.num_steps", "16", "--loop.eval_every", "4", "--task.num_eval", "128",
)  # fmt: skip
"""Options of a run; a higher learning rate reaches the goal in fewer steps."""
RUN_TIMEOUT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, at a higher learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    seeds, options = (args.seeds[:1], QUICK) if args.quick else (args.seeds, WHOLE)
    load = os.getloadavg()[0]
    reached: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with open_runs_folder() as folder:
        for seed in seeds:
            start = prepare_start(folder, seed=seed)
            for side, config in SIDES.items():
                records = _run(
                    folder, f"{config}-{seed}", "--config", config, "--seed", str(seed),
                    "--hf_assets_path", start, "--warmup", "None", *options,
                )  # fmt: skip
                reached[side].append(first_reached(records, goal=GOAL))
                print(f"seed {seed}, {side}: {reached[side][-1]}", flush=True)
    medians = {
        side: {key: statistics.median(values[key] for values in of_seeds) for key in of_seeds[0]}
        for side, of_seeds in reached.items()
    }
    figures = {
        "benchmark": "time_to_reward",
        "goal": GOAL,
        "seeds": seeds,
        "options": options,
        "load_before": round(load, 2),
        "reached": reached,
        "medians": medians,
        "compared": "seconds until nine tenths are right: in turns over one step ahead",
        "ratio": {"seconds": medians["sync"]["seconds"] / medians["async"]["seconds"]},
    }
    print(json.dumps(figures))


def first_reached(records: list[dict[str, float]], *, goal: float) -> dict[str, float]:
    """Return the first step evaluated at `goal`, the seconds of steps before it, and the largest
    staleness.

    Raises:
        ValueError: the goal was never reached.
    """
    seconds = staleness = 0.0
    for record in records:
        seconds += record.get("time/step_s", 0.0)
        staleness = max(staleness, record.get("staleness/max", 0.0))
        if record.get("eval/correct", 0.0) >= goal:
            return {"step": record["step"], "seconds": seconds, "staleness_max": staleness}
    raise ValueError(f"no evaluation reached {goal}")


def _run(folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """Return the metrics of a run in order."""
    return whole_run(folder, name, "--module", "sum_digits", *options, timeout_s=RUN_TIMEOUT_S)


if __name__ == "__main__":
    main()
