"""Cost of a generator step by part, and of vLLM's own model in the same engine.

    python -m benchmarks.generator_step [--quick]
    python -m benchmarks.generator_step --model FOLDER --dtype bfloat16 --threads 2 --sequences 32
    128 --vllm

Prompts x 8 samples go through the engine as in training; without `--model`, those of the tiny
model. `ms_per_step` and `tokens_per_s` are wall-clock figures of the whole call, the best of the
repeats, because other processes only add time. `of_limit` is the share of the machine's measured
limit for the products and the bytes read. The parts are time of the thread that steps the engine,
exclusive of nested parts:

    model      forward
    head       output head
    prepare    the model runner: inputs from the batch's state, and the state's update
    sample     logprobs and sampling
    schedule   the scheduler
    output     vLLM's results, and ours from them
    hand over  the rest of the process: event loop, completions

With `--vllm`, and with `--quick`, vLLM's own model of that folder takes turns with ours, call by
call: the same weights, scheduler, cache and sampler. `ratio` is its time for a call over ours, the
median of the pairs: above 1 ours is faster.

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.vllm.compat import get_model_runner
from actors.vllm.engine import GeneratorEngine
from benchmarks.processes import tiny_assets
from rl.models.files.hf import HFFolder, read_parameters
from rl.models.model_cost import ModelWork, count_work
from rl.models.spec import spec_from_hf
from rl.observability.machine import MachineLimits, measure_limits
from rl.types import SamplingParams
from rl.utils.processes import use_threads

NUM_SAMPLES, PROMPT_LENGTH = 8, 40
PARTS = ("model", "head", "prepare", "sample", "schedule", "output")


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


def watch_engine(engine: GeneratorEngine, models: list[nn.Module]) -> PartClock:
    clock = PartClock()
    core = engine._core
    vllm_core = core._client.engine_core
    runner = get_model_runner(core._client)
    clock.watch(core, "step", "output")
    clock.watch(vllm_core.scheduler, "schedule", "schedule")
    clock.watch(vllm_core.scheduler, "update_from_output", "output")
    clock.watch(runner, "execute_model", "prepare")
    clock.watch(runner, "sample_tokens", "prepare")
    for model in models:
        clock.watch(model, "forward", "model")
        clock.watch(model, "compute_logits", "head")
    clock.watch(runner.sampler, "forward", "sample")
    return clock


def vllms_model(engine: GeneratorEngine, folder: str) -> nn.Module:
    """Return vLLM's own model with the folder's weights, over the cache of ours; call it in the
    engine's thread.
    """
    from safetensors.torch import load_file
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.model_executor.models import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    runner = get_model_runner(engine._core._client)
    config, opened = runner.vllm_config.model_config, HFFolder(folder)
    with set_default_torch_dtype(config.dtype):
        kind, _ = ModelRegistry.resolve_model_cls(opened.config["architectures"], config)
        model: Any = initialize_model(runner.vllm_config, prefix="vllms", model_class=kind)
        model.load_weights(
            (name, t) for file in set(opened.files.values()) for name, t in load_file(file).items()
        )
        process_weights_after_loading(model, config, torch.device("cpu"))
    layers = [[m for m in of.modules() if isinstance(m, Attention)] for of in (runner.model, model)]
    for ours, theirs in zip(*layers, strict=True):
        theirs.layer_name = ours.layer_name  # vLLM finds the cache by this name
    return model.eval()


async def one_call(
    engine: GeneratorEngine, clock: PartClock, *, sequences: int, tokens: int, seed: int
) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, engine._core.vocab_size, PROMPT_LENGTH).astype(np.int32)
        for _ in range(sequences // NUM_SAMPLES)
    ]
    sampling = SamplingParams(max_tokens=tokens, num_samples=NUM_SAMPLES, seed=seed)
    await engine.run_between_steps(engine._core._client.reset_prefix_cache)
    clock.clear()
    started, cpu_started = time.perf_counter(), time.process_time()
    await engine.generate(prompts, sampling=sampling)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    steps = clock.calls["schedule.schedule"]
    row = {part: clock.seconds[part] / steps * 1e3 for part in PARTS}
    row["hand over"] = cpu_s / steps * 1e3 - sum(row.values())
    return {"wall": wall_s / steps * 1e3, "steps": steps, "cpu": cpu_s / steps * 1e3} | row


def summary(
    rows: list[dict[str, float]], *, sequences: int, tokens: int, limit_s: float
) -> dict[str, Any]:
    parts = {name: statistics.median(row[name] for row in rows) for name in (*PARTS, "hand over")}
    wall_ms, steps = min(row["wall"] for row in rows), rows[0]["steps"]
    call_s, cpu_ms = wall_ms * steps / 1e3, sum(parts.values())
    return {
        "ms_per_step": round(wall_ms, 2),
        "call_s": round(call_s, 3),
        "of_limit": round(limit_s / call_s, 3),
        "cpu_ms_per_step": round(cpu_ms, 2),
        "tokens_per_s": round(sequences * tokens / call_s),
        "steps": steps,
        "parts_ms": {name: round(ms, 2) for name, ms in parts.items()},
        "share": {name: round(ms / cpu_ms, 3) for name, ms in parts.items()},
    }


def least_s(
    work: ModelWork, limits: MachineLimits, *, sequences: int, tokens: int, itemsize: int
) -> float:
    """Return the shortest possible duration of a call, as runs report it
    (`rl.observability.machine`).
    """
    drawn = sequences * tokens
    attended = drawn * (PROMPT_LENGTH + tokens / 2)
    flops = work.count_sampling_flops(
        tokens=drawn + PROMPT_LENGTH * sequences // NUM_SAMPLES, attended=attended
    )
    read = work.count_sampling_bytes(
        steps=tokens, tokens=drawn, attended=attended, itemsize=itemsize
    )
    return max(flops / limits.flops_per_s, read / limits.memory_bytes_per_s)


async def start_engine(args: argparse.Namespace, folder: str) -> GeneratorEngine:
    use_threads(1)  # The engine computes in another thread.
    opened = HFFolder(folder)
    spec = spec_from_hf(opened.config)
    config = GeneratorEngine.Config(
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=max(args.sequences),
        cpu_kv_cache_gib=0.25 if args.model is None else 1.5,
        num_threads=args.threads,
    )
    if args.compiled:  # which relay's own engine never does on a CPU
        from actors.vllm import core

        make = core.build_engine_args
        core.build_engine_args = lambda *values, **options: replace(
            make(*values, **options), enforce_eager=False
        )
    engine = GeneratorEngine(config=config, model_spec=spec, hf_assets_path=folder)
    await engine.start()

    async def write(state_dict: dict[str, Tensor]) -> None:
        names = opened.list_present(state_dict, spec.adapter(spec.model))
        for name, tensor in read_parameters(opened, spec.adapter(spec.model), names):
            state_dict[name].copy_(tensor)

    await engine.update_weights(write, version=1)
    return engine


async def benchmark(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    engine = await start_engine(args, folder)
    runner = get_model_runner(engine._core._client)
    sides = {"ours": runner.model}
    if args.vllm:
        sides["vllm"] = await engine.run_between_steps(partial(vllms_model, engine, folder))
    clock = watch_engine(engine, list(sides.values()))
    work = count_work(engine._core.model.config)
    itemsize = getattr(torch, args.dtype).itemsize
    limits = await engine.run_between_steps(
        partial(
            measure_limits,
            dtype=args.dtype,
            num_bytes=work.read * itemsize,
            device=torch.device("cpu"),
        )
    )
    figures: dict[str, Any] = {}
    ratio: dict[str, float] = {}
    for sequences, tokens in itertools.product(args.sequences, args.tokens):
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for repeat in range(args.repeats + 1):
            for name, runner.model in sides.items():
                row = await one_call(engine, clock, sequences=sequences, tokens=tokens, seed=repeat)
                rows[name] += [row] * (repeat > 0)  # the first allocates
        size = {"sequences": sequences, "tokens": tokens}
        limit_s = least_s(work, limits, itemsize=itemsize, **size)
        call = f"{sequences}x{tokens}"
        figures[call] = {name: summary(of, limit_s=limit_s, **size) for name, of in rows.items()}
        if args.vllm:
            pairs = zip(rows["ours"], rows["vllm"], strict=True)
            ratio[call] = round(statistics.median(b["wall"] / a["wall"] for a, b in pairs), 3)
    await engine.close()
    return {
        "benchmark": "generator_step",
        "model": args.model or "tiny",
        "dtype": args.dtype,
        "threads": args.threads,
        "repeats": args.repeats,
        "tflops_per_s": round(limits.flops_per_s / 1e12, 2),
        "calls": figures,
        "compared": "time of a call: vLLM's own model over ours",
        "ratio": ratio,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats, with --vllm")
    parser.add_argument(
        "--model", help="Hugging Face folder; without one, random weights of the tiny model"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128], help="running requests")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="new tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's own model")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile its own model")
    args = parser.parse_args(arguments)
    args.vllm = args.vllm or args.quick
    args.repeats = (3 if args.quick else 15) if args.model is None else (2 if args.quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(benchmark(args, args.model or tiny_assets(Path(folder))))
    for call, sides in figures["calls"].items():
        for name, row in sides.items():
            parts = ", ".join(f"{part} {ms} ms" for part, ms in row["parts_ms"].items())
            print(
                f"{call} {name}: {row['ms_per_step']} ms a step, {row['tokens_per_s']} tokens/s, "
                f"{row['of_limit']:.0%} of the limit; {parts}"
            )
        if call in figures["ratio"]:
            print(f"{call} ratio: {figures['ratio'][call]}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
