"""Samples per second and idle time of each actor: the synchronous loop against the asynchronous one.

    python -m benchmarks.async_overlap [--quick] [--tokens 32]

The tiny model from the same seeded weights on the same prompts, 32 prompts x 8 samples a step.
Synchronous, trainer and generator compute in turns, on all threads each; asynchronous, they compute at the
same time, on half of them each, with generation up to `--ages` steps ahead. Each measurement is a run with
all its actors; the sides take turns. The last line is a JSON object: medians over the repeats, idle times as
shares of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import in_process_of_its_own

NUM_WARMUP_STEPS = 3
"""Not measured: the first steps allocate, and fill what is under way."""
ROLES = ("generator", "reward", "trainer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short repeat of each")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens at most")
    parser.add_argument(
        "--ages", type=int, nargs="+", default=[1, 2], help="max_policy_age of the async sides"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    steps, repeats = (4, 1) if args.quick else (12, 3)
    print(json.dumps(compare(args.tokens, args.ages, steps=steps, repeats=repeats, threads=args.threads)))


def compare(tokens: int, ages: list[int], *, steps: int, repeats: int, threads: int) -> dict[str, Any]:
    """Each side `repeats` times, in turns."""
    sides: dict[str, list[dict[str, float]]] = {str(age): [] for age in (0, *ages)}
    with tempfile.TemporaryDirectory() as folder:
        assets = _make_assets(Path(folder) / "model")
        for repeat in range(repeats):
            for age, measured in sides.items():
                arguments = {"assets": str(assets), "tokens": tokens, "steps": steps, "age": int(age)}
                measured.append(
                    in_process_of_its_own(run_side, threads=threads, num_threads=threads, **arguments)
                )
                figures = ", ".join(f"{name} {value:.3g}" for name, value in measured[-1].items())
                print(f"repeat {repeat + 1}, max_policy_age {age}: {figures}", flush=True)
    medians = {
        age: {name: statistics.median(m[name] for m in measured) for name in measured[0]}
        for age, measured in sides.items()
    }
    return {
        "benchmark": "async_overlap",
        "tokens": tokens,
        "threads": threads,
        "repeats": repeats,
        "by_max_policy_age": medians,
        "ratio": {
            str(age): medians[str(age)]["samples_per_s"] / medians["0"]["samples_per_s"] for age in ages
        },
    }


def run_side(assets: str, tokens: int, steps: int, age: int, num_threads: int) -> dict[str, float]:
    """A run of one side: samples per second, and the share of time in which each role had nothing to do."""
    from configs.sum_digits import tiny, tiny_async
    from rl.config.registry import ResolvedRun
    from rl.observability.metrics import read_metrics

    config = tiny_async() if age else tiny()
    config.trainer.num_threads = config.generator.num_threads = (
        max(1, num_threads // 2) if age else num_threads
    )
    config.hf_assets_path, config.warmup = assets, None
    loop = config.loop
    loop.max_policy_age = age
    loop.num_steps = loop.max_empty_steps = steps + NUM_WARMUP_STEPS
    loop.sampling.max_tokens = tokens
    loop.eval_every = 0
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        run = ResolvedRun(module="sum_digits", function="tiny", config=config)
        path = config.build(run=run).run()
        records = read_metrics(path / "metrics.jsonl")[NUM_WARMUP_STEPS:]
    total_s = sum(record["time/step_s"] for record in records)
    idle = {f"{role}_idle": sum(r[f"time/{role}_idle_s"] for r in records) / total_s for role in ROLES}
    samples_per_s = len(records) * loop.num_prompts * loop.num_samples / total_s
    return {"samples_per_s": samples_per_s, "age_max": max(r["age/max"] for r in records), **idle}


def _make_assets(folder: Path) -> Path:
    from rl.models.qwen3 import model_registry
    from rl.models.starting_point import write_random_model

    return write_random_model(folder, spec=model_registry("tiny"), seed=0)


if __name__ == "__main__":
    main()
