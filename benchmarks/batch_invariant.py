"""Cost of the batch-invariant mode: whole steps of the tiny config, on against off.

    python -m benchmarks.batch_invariant [--quick]

Each measurement is a run with all actors from the same random weights, 32 x 8 completions of 32
tokens a step; the sides alternate, so that other load affects both. The last line is a JSON object
of medians; `ratio` is the step time with the mode over the step time without it.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.processes import loop_steps, measure_steps, num_repeats, step_options

SIDES = {"off": {"batch_invariant": False}, "on": {"batch_invariant": True}}


def main(arguments: list[str] | None = None) -> None:
    parser = step_options(__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens at most")
    args = parser.parse_args(arguments)
    medians = measure_steps(run_side, SIDES, args=args, tokens=args.tokens)
    figures = {
        "benchmark": "batch_invariant",
        "threads": args.threads,
        "repeats": num_repeats(args),
        **medians,
        "compared": "time of a step: batch-invariant mode on over off",
        "ratio": round(medians["on"]["step_s"] / medians["off"]["step_s"], 4),
    }
    print(json.dumps(figures))


def run_side(batch_invariant: bool, num_threads: int, **how: Any) -> dict[str, float]:
    """Run one side and return the medians of its steps."""
    from configs.sum_digits import tiny

    config = tiny()
    config.batch_invariant = batch_invariant
    records = loop_steps(config, threads=[num_threads] * 2, **how)
    names = {
        "generator_tokens_s": "perf/generated_tokens_per_s",
        "trainer_tokens_s": "perf/trained_tokens_per_s",
        "step_s": "time/step_s",
        "logprob_diff_max": "logprob_diff/max",
    }
    return {
        short: statistics.median(record[name] for record in records)
        for short, name in names.items()
    }


if __name__ == "__main__":
    main()
