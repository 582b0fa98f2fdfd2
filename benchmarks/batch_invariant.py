"""Cost of the batch-invariant mode: whole steps of the tiny config, on against off.

    python -m benchmarks.batch_invariant [--quick]

Each measurement is a run with all actors from the same random weights, 32 x 8 completions of 32 tokens a step; the
sides alternate, so that other load affects both. The last line is a JSON object of medians; `cost` is the step time
with the mode over the step time without it, minus 1.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.processes import medians_of_sides, step_options, tiny_assets, tiny_run

NUM_WARMUP_STEPS = 3
"""Steps at the start that are not measured: they allocate and compile."""
SIDES = {"off": {"batch_invariant": False}, "on": {"batch_invariant": True}}


def main(arguments: list[str] | None = None) -> None:
    parser = step_options(__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens at most")
    args = parser.parse_args(arguments)
    steps, repeats = (4, 1) if args.quick else (12, 3)
    with tempfile.TemporaryDirectory() as folder:
        medians = medians_of_sides(
            run_side, SIDES, repeats=repeats, threads=args.threads,
            assets=tiny_assets(Path(folder)), tokens=args.tokens, steps=steps,
        )  # fmt: skip
    cost = medians["on"]["step_s"] / medians["off"]["step_s"] - 1
    print(json.dumps({"threads": args.threads, "repeats": repeats, **medians, "cost": round(cost, 4)}))


def run_side(
    assets: str, tokens: int, steps: int, num_threads: int, batch_invariant: bool
) -> dict[str, float]:
    """Run one side and return the medians of its steps."""
    from configs.sum_digits import tiny

    config = tiny()
    config.batch_invariant = batch_invariant
    config.trainer.num_threads = config.generator.num_threads = num_threads
    records = tiny_run(config, assets=assets, tokens=tokens, num_steps=steps + NUM_WARMUP_STEPS)
    names = {
        "generator_tokens_s": "perf/generated_tokens_per_s",
        "trainer_tokens_s": "perf/trained_tokens_per_s",
        "step_s": "time/step_s",
        "logprob_diff_max": "logprob_diff/max",
    }
    measured = records[NUM_WARMUP_STEPS:]
    return {short: statistics.median(record[name] for record in measured) for short, name in names.items()}


if __name__ == "__main__":
    main()
