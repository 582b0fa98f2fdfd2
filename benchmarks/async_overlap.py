"""Samples per second and idle time of each actor: the synchronous loop against the asynchronous
one.

    python -m benchmarks.async_overlap [--quick] [--tokens 32]

The tiny model trains from the same seeded weights on the same prompts, 32 prompts x 8 samples a
step. In the synchronous side trainer and generator take turns with all threads each; in the
asynchronous side they run at the same time with half of the threads each, and generation is up to
`--staleness` steps ahead. Each measurement is a run with all actors, alternating between sides. The
last line is a JSON object with medians over the repeats and idle times as shares of a step.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.processes import loop_steps, measure_steps, num_repeats, step_options

ROLES = ("generator", "reward", "trainer")


def main() -> None:
    parser = step_options(__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens at most")
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        help="max_off_policy_steps of the async sides; 1 2",
    )
    args = parser.parse_args()
    args.staleness = args.staleness or ([1] if args.quick else [1, 2])
    sides = {str(steps): {"steps_ahead": steps} for steps in (0, *args.staleness)}
    medians = measure_steps(run_side, sides, args=args, tokens=args.tokens)
    ratio = {
        str(steps): medians[str(steps)]["samples_per_s"] / medians["0"]["samples_per_s"]
        for steps in args.staleness
    }
    figures = {
        "benchmark": "async_overlap",
        "tokens": args.tokens,
        "threads": args.threads,
        "repeats": num_repeats(args),
        "by_steps_ahead": medians,
        "compared": "samples/s: so many steps ahead over in turns",
        "ratio": ratio,
    }
    print(json.dumps(figures))


def run_side(steps_ahead: int, num_threads: int, **how: Any) -> dict[str, float]:
    """Run one side and return its samples per second and the share of time in which each role was
    idle.
    """
    from configs.sum_digits import tiny, tiny_async

    config = tiny_async() if steps_ahead else tiny()
    loop = config.loop
    loop.max_off_policy_steps = steps_ahead
    threads = [max(1, num_threads // 2) if steps_ahead else num_threads] * 2
    records = loop_steps(config, threads=threads, num_cooldown=steps_ahead, **how)
    total_s = sum(record["time/step_s"] for record in records)
    idle = {
        f"{role}_idle": sum(r[f"time/{role}_idle_s"] for r in records) / total_s for role in ROLES
    }
    samples_per_s = len(records) * loop.groups_per_batch * loop.group_size / total_s
    return {
        "samples_per_s": samples_per_s,
        "staleness_max": max(r["staleness/max"] for r in records),
        **idle,
    }


if __name__ == "__main__":
    main()
