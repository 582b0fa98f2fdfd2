"""Tokens per second of whole training steps: relay's engine against transformers with padding.

    python -m benchmarks.train_step [--quick]
    python -m benchmarks.train_step --flavor 1.7B --compile

All sides train Qwen3 on the same batch of sequences of different lengths: forward, cross-entropy of every target
token, backward, clipping and a step of fused AdamW, from the same seeded weights, in the same dtype, on the same
number of threads, with the same token limit of a micro-batch. Three sides alternate, each in its own process:

    relay                sequences packed on one axis, no padding
    transformers         Qwen3ForCausalLM (sdpa), padded to the longest sequence of each micro-batch, in the given
                         order: the side that `ratio` compares with
    transformers_sorted  the same, longest sequences first, so that there is little padding: `ratio_sorted`

Padding does not count as tokens. Peak memory is allocated memory on a GPU, resident memory beyond imports on a CPU.
Model FLOPs utilisation (on a GPU) is 6 N a token + 12 layers x heads x head size x length over the device's rate;
`mfu_causal` counts half of the second term. The losses of the first step must agree. Needs torch, transformers,
safetensors and numpy only. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.processes import Worker
from benchmarks.train_step_figures import (
    FLAVORS,
    Facts,
    Turn,
    Workload,
    figures,
    loss_differences,
    loss_tolerance,
)

NAMES = ("relay", "transformers", "transformers_sorted")
NUM_WARMUP_STEPS = 2
"""Steps at the start that are not measured: they allocate and compile."""

TakeTurn = Callable[[int], Turn]
"""Function that runs the given number of steps of a side."""


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        workload = workload_of(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    repeats, steps = (2, 1) if args.quick else (args.repeats, args.steps)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, workload, threads=args.threads)) for name in NAMES}
        sides = {name: partial(_turn, worker) for name, worker in workers.items()}
        result = compare(
            workload,
            facts=Facts(**workers["relay"].call("describe")),
            sides=sides,
            repeats=repeats,
            steps=steps,
            threads=args.threads,
        )
    print(json.dumps(result))


def _worker(name: str, workload: Workload, *, threads: int) -> Worker:
    """Start a side in its own process."""
    runner = "benchmarks.train_step_sides:Runner"
    return Worker(runner, threads=threads, name=name, workload=asdict(workload), num_threads=threads)


def _turn(worker: Worker, num_steps: int) -> Turn:
    return Turn(**worker.call("turn", num_steps))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small batch, two steps of each side")
    options.add_argument("--flavor", choices=tuple(FLAVORS), help="small on a CPU, 0.6B on a GPU")
    options.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on a GPU"
    )
    lengths = options.add_mutually_exclusive_group()
    lengths.add_argument("--sequence-length", type=int, metavar="N", help="of each; 4096 on a GPU")
    lengths.add_argument("--lengths", type=int, nargs=2, metavar=("LO", "HI"), help="16 256 on a CPU")
    options.add_argument("--tokens", type=int, help="of a step, at least; 8192 on a CPU, 65536 on a GPU")
    options.add_argument(
        "--microbatch-tokens", type=int, help="at most, padding counted; 4096 on a CPU, 8192 on a GPU"
    )
    options.add_argument("--logits-chunk-tokens", type=int, help="of the engine's head; not chunked")
    options.add_argument("--compile", action="store_true", help="torch.compile blocks and loss, on all sides")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--repeats", type=int, default=5, help="turns of each side; 5")
    options.add_argument("--steps", type=int, default=2, help="steps of a turn; 2")
    options.add_argument("--seed", type=int, default=0, help="of weights and batch")
    return options


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload, with defaults by device; raise ValueError for a size out of range."""
    device = args.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    for name in ("threads", "repeats", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)}: must be at least 1")
    fallback: dict[str, Any] = {
        "flavor": "small" if on_cpu else "0.6B",
        "dtype": "float32" if on_cpu else "bfloat16",
        "tokens": (2048 if args.quick else 8192) if on_cpu else (16_384 if args.quick else 65_536),
        "microbatch_tokens": 4096 if on_cpu else 8192,
    }
    given = {name: getattr(args, name) for name in fallback if getattr(args, name) is not None}
    lengths = args.lengths or ((16, 256) if on_cpu else (4096, 4096))
    if args.sequence_length is not None:
        lengths = (args.sequence_length, args.sequence_length)
    return Workload(
        device=device,
        min_length=lengths[0],
        max_length=lengths[1],
        logits_chunk_tokens=args.logits_chunk_tokens,
        compile=args.compile,
        seed=args.seed,
        **(fallback | given),
    )


def compare(
    workload: Workload,
    *,
    facts: Facts,
    sides: Mapping[str, TakeTurn],
    repeats: int,
    steps: int,
    threads: int,
) -> dict[str, Any]:
    """Warm up all sides, compare their losses, measure them in turns and return the figures.

    Raises:
        LossesDifferError: their first losses differ.
    """
    losses = {name: list(turn(NUM_WARMUP_STEPS).losses) for name, turn in sides.items()}
    loss_differences(losses, tolerance=loss_tolerance(workload))
    num_tokens = sum(workload.lengths())
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, turn in sides.items():
            measured = turn(steps)
            turns[name].append(measured)
            losses[name].extend(measured.losses)
            print(
                f"repeat {repeat + 1}: {name} {num_tokens / measured.step_s:.0f} tokens/s, "
                f"{measured.peak_memory_bytes / 2**30:.2f} GiB",
                flush=True,
            )
    differences = loss_differences(losses, tolerance=loss_tolerance(workload))
    return figures(workload, facts=facts, turns=turns, differences=differences, threads=threads)


if __name__ == "__main__":
    main()
