"""Cost of a generator step by part: 128 running requests of the tiny model in float32.

    python -m benchmarks.generator_step [--quick]

16 prompts x 8 samples go through the engine as in training, with 16 and with 64 new tokens. `ms_per_step` and
`tokens_per_s` are wall-clock figures of the whole call, the best of the repeats, because other processes only add
time. The parts are CPU time of the thread that steps the engine, exclusive of nested parts:

    model      forward and output head
    prepare    the model runner: inputs from the batch's state, and the state's update
    sample     logprobs and sampling
    schedule   the scheduler
    output     vLLM's results, and ours from them
    hand over  the rest of the process: event loop, completions

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from actors.vllm.engine import GeneratorEngine
from benchmarks.processes import tiny_assets
from rl.models.qwen3 import model_registry
from rl.types import SamplingParams

NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH = 16, 8, 40
PARTS = ("model", "prepare", "sample", "schedule", "output")


class PartClock:
    """CPU seconds of the calling thread by part, exclusive of nested parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner: list[float] = []

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count all further calls of this method of `owner` as the part."""
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - started
                self.seconds[part] += spent - self._inner.pop()
                self.calls[f"{part}.{method}"] += 1
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, method, timed)


def watch_engine(engine: GeneratorEngine) -> PartClock:
    clock = PartClock()
    core = engine._core
    vllm_core = core._client.engine_core
    runner = vllm_core.model_executor.driver_worker.worker.model_runner
    clock.watch(core, "step", "output")
    clock.watch(vllm_core.scheduler, "schedule", "schedule")
    clock.watch(vllm_core.scheduler, "update_from_output", "output")
    clock.watch(runner, "execute_model", "prepare")
    clock.watch(runner, "sample_tokens", "prepare")
    clock.watch(runner.model, "forward", "model")
    clock.watch(runner.model, "compute_logits", "model")
    clock.watch(runner.sampler, "forward", "sample")
    return clock


async def measure(engine: GeneratorEngine, clock: PartClock, *, tokens: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, engine._core.vocab_size, PROMPT_LENGTH).astype(np.int32) for _ in range(NUM_PROMPTS)
    ]
    rows = []
    for repeat in range(repeats + 1):
        sampling = SamplingParams(max_tokens=tokens, num_samples=NUM_SAMPLES, seed=repeat)
        clock.clear()
        started, cpu_started = time.perf_counter(), time.process_time()
        await engine.generate(prompts, sampling=sampling)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        steps = clock.calls["schedule.schedule"]
        row = {part: clock.seconds[part] / steps * 1e3 for part in PARTS}
        row["hand over"] = cpu_s / steps * 1e3 - sum(row.values())
        rows.append({"wall": wall_s / steps * 1e3, "steps": steps, "cpu": cpu_s / steps * 1e3} | row)
    rows = rows[1:]  # The first allocates.
    parts = {name: statistics.median(row[name] for row in rows) for name in (*PARTS, "hand over")}
    wall_ms = min(row["wall"] for row in rows)
    cpu_ms = sum(parts.values())
    return {
        "ms_per_step": round(wall_ms, 2),
        "cpu_ms_per_step": round(cpu_ms, 2),
        "tokens_per_s": round(NUM_PROMPTS * NUM_SAMPLES * tokens / (wall_ms * rows[0]["steps"]) * 1e3),
        "steps": rows[0]["steps"],
        "parts_ms": {name: round(ms, 2) for name, ms in parts.items()},
        "share": {name: round(ms / cpu_ms, 3) for name, ms in parts.items()},
    }


async def write_random_weights(state_dict: dict[str, Tensor]) -> None:
    for tensor in state_dict.values():
        tensor.normal_(std=0.02)


async def benchmark(assets: str, *, token_limits: list[int], repeats: int, threads: int) -> dict[str, Any]:
    config = GeneratorEngine.Config(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=NUM_PROMPTS * NUM_SAMPLES,
        cpu_kv_cache_gib=0.25,
        num_threads=threads,
    )
    engine = GeneratorEngine(config=config, model_spec=model_registry("tiny"), hf_assets_path=assets)
    await engine.start()
    await engine.update_weights(write_random_weights, version=1)
    clock = watch_engine(engine)
    figures = {
        str(tokens): await measure(engine, clock, tokens=tokens, repeats=repeats) for tokens in token_limits
    }
    await engine.close()
    return {
        "benchmark": "generator_step",
        "requests": NUM_PROMPTS * NUM_SAMPLES,
        "threads": threads,
        "repeats": repeats,
        "new_tokens": figures,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="new tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        repeats = 3 if args.quick else 15
        figures = asyncio.run(
            benchmark(
                tiny_assets(Path(folder)), token_limits=args.tokens, repeats=repeats, threads=args.threads
            )
        )
    for tokens, row in figures["new_tokens"].items():
        parts = ", ".join(f"{name} {ms} ms" for name, ms in row["parts_ms"].items())
        print(f"{tokens} new tokens: {row['ms_per_step']} ms a step, {row['tokens_per_s']} tokens/s; {parts}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
