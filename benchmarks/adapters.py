"""Adapters beside a base in one engine: decoding with one, eight and sixty-four of them, against
merged weights and against versions of whole weights that take turns.

    python -m benchmarks.adapters [--quick]
    python -m benchmarks.adapters --flavor SmolLM2-135M --dtype bfloat16 --threads 2

A Llama of the flavor's sizes with random weights serves `--sequences` requests of 32 prompt tokens
and `--tokens` new ones, all at once. In each repeat all sides take turns, call by call; figures are
medians, and each ratio is the median of the pairs of a repeat.

    merged       weights alone, as after a merge; the layers' hooks find nothing to add
    one          all requests with one adapter of rank 16 on all linear layers
    eight        with eight adapters of rank 16 in one batch
    one rank 8   all requests with one adapter of rank 8
    64 rank 8    with 64 adapters of rank 8 in one batch
    turns        whole weights are written for each of 64 versions, of which one request each is
                 served; some turns are measured, and their time is that of all

`of_model` is the bytes of an adapter over those of the whole weights. `load_s` is the time from an
adapter's tensors until requests can use it, `update_s` that of whole weights. `memory_share` is
what the process has grown by with 64 adapters over the bytes of their A and B.

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from actors.vllm.engine import GeneratorEngine
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec, model_spec
from rl.types import SamplingParams
from rl.utils.processes import use_threads

PROMPT_LENGTH = 32
MEASURED_TURNS = 3
RANK_16 = range(100, 108)
RANK_8 = range(200, 264)


async def fill(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.normal_(0.0, 0.02, generator=generator)


def count_factors(spec: ModelSpec, rank: int) -> int:
    """Return the numbers of A and B of all linear layers, by hand."""
    model = spec.model
    attention, hidden = model.block.attention, model.block.feed_forward.hidden_dim  # type: ignore[attr-defined]
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    sizes = [(model.dim, width) for width in (queries, keys, keys, hidden, hidden)]
    sizes += [(queries, model.dim), (hidden, model.dim)]
    return model.num_layers * rank * sum(num_in + num_out for num_in, num_out in sizes)


async def call(
    engine: GeneratorEngine, versions: Sequence[int | None], *, tokens: int, seed: int
) -> float:
    """Return the tokens per second of requests with these adapters, all at once."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=tokens, seed=seed)
    prompts = [
        rng.integers(0, engine._core.vocab_size, PROMPT_LENGTH).astype(np.int32) for _ in versions
    ]
    started = time.perf_counter()
    calls = []
    for prompt, version in zip(prompts, versions, strict=True):
        calls.append(engine.generate([prompt], sampling=sampling, adapter=version))
    await asyncio.gather(*calls)
    return len(versions) * tokens / (time.perf_counter() - started)


async def call_in_turns(engine: GeneratorEngine, *, tokens: int, seed: int) -> float:
    """Return the tokens per second if each request has weights of its own."""
    started = time.perf_counter()
    for turn in range(MEASURED_TURNS):
        await engine.update_weights(fill, version=1 + turn)
        await call(engine, [None], tokens=tokens, seed=seed)
    return MEASURED_TURNS * tokens / (time.perf_counter() - started)


async def load(engine: GeneratorEngine, version: int, lora: LoRA.Config) -> float:
    started = time.perf_counter()
    await engine.load_adapter(
        fill, version=version, lora=lora, base_id=engine.base_id, is_newest=False
    )
    return time.perf_counter() - started


async def start_engine(args: argparse.Namespace, folder: Path, spec: ModelSpec) -> GeneratorEngine:
    use_threads(1)  # The engine computes in another thread.
    config_text = json.dumps(spec.adapter(spec.model).hf_config())
    (folder / "config.json").write_text(config_text, encoding="utf-8")
    config = GeneratorEngine.Config(
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=args.sequences,
        cpu_kv_cache_gib=1.0,
        num_threads=args.threads,
        adapter_memory_gib=4.0,
    )
    engine = GeneratorEngine(config=config, model_spec=spec, hf_assets_path=str(folder))
    await engine.start()
    return engine


async def time_calls(engine: GeneratorEngine, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of each side, repeat by repeat."""
    num = args.sequences
    sides: dict[str, list[int | None]] = {
        "merged": [None] * num,
        "one": [RANK_16[0]] * num,
        "eight": [RANK_16[i % 8] for i in range(num)],
        "one rank 8": [RANK_8[0]] * num,
        "64 rank 8": [RANK_8[i % 64] for i in range(num)],
    }
    rows: dict[str, list[float]] = {name: [] for name in (*sides, "turns")}
    for repeat in range(args.repeats + 1):
        speeds: dict[str, float] = {}
        for name, versions in sides.items():
            speeds[name] = await call(engine, versions, tokens=args.tokens, seed=repeat)
        speeds["turns"] = await call_in_turns(engine, tokens=args.tokens, seed=repeat)
        for name, speed in speeds.items():
            rows[name] += [speed] * (repeat > 0)  # The first allocates.
    return rows


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    spec = model_spec("llama", args.flavor)
    engine = await start_engine(args, folder, spec)
    started = time.perf_counter()
    await engine.update_weights(fill, version=0)
    update_s = time.perf_counter() - started
    loads_s = [await load(engine, version, LoRA.Config(rank=16)) for version in RANK_16]
    before = psutil.Process().memory_info().rss
    for version in RANK_8:
        await load(engine, version, LoRA.Config(rank=8))
    grown = psutil.Process().memory_info().rss - before

    rows = await time_calls(engine, args)
    weights = sum(tensor.nbytes for tensor in engine.model_state_dict().values())
    await engine.close()
    itemsize = getattr(torch, args.dtype).itemsize
    of_rank = {rank: count_factors(spec, rank) * itemsize for rank in (8, 16)}

    def ratio(side: str, other: str) -> float:
        pairs = zip(rows[side], rows[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "benchmark": "adapters",
        "model": args.flavor,
        "dtype": args.dtype,
        "threads": args.threads,
        "sequences": args.sequences,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "tokens_per_s": {name: round(statistics.median(of), 1) for name, of in rows.items()},
        "adapter_mb": {rank: round(size / 1e6, 2) for rank, size in of_rank.items()},
        "of_model": {rank: round(size / weights, 4) for rank, size in of_rank.items()},
        "load_s": round(statistics.median(loads_s), 4),
        "update_s": round(update_s, 3),
        "memory_share": round(grown / (len(RANK_8) * of_rank[8]), 3),
        "compared": "tokens a second",
        "ratio": {
            "one over merged": ratio("one", "merged"),
            "eight over one": ratio("eight", "one"),
            "64 over one, rank 8": ratio("64 rank 8", "one rank 8"),
            "64 over turns": ratio("64 rank 8", "turns"),
        },
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model, few repeats")
    parser.add_argument("--flavor", default="SmolLM2-135M", help="sizes of the model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    args.repeats = 5
    if args.quick:
        args.repeats, args.tokens, args.sequences = 2, 8, 64
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args, Path(folder)))
    for name, speed in figures["tokens_per_s"].items():
        print(f"{name:12} {speed:8.1f} tokens/s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
