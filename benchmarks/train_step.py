"""Tokens per second of whole training steps: relay's engine against transformers with padding.

    python -m benchmarks.train_step [--quick]
    python -m benchmarks.train_step --flavor SmolLM2-135M --lengths 32 256 --dtype mixed
    python -m benchmarks.train_step --flavor 1.7B --compile

All sides train one model on the same batch of sequences of different lengths: forward,
cross-entropy of every target token, backward, clipping and a step of fused AdamW, from the same
seeded weights, in the same dtype, on the same number of threads, with the same token limit of a
micro-batch. In dtype `bfloat16` everything is bfloat16; in `mixed` weights and optimizer are
float32, forward and backward bfloat16: `param_dtype` in relay, autocast in transformers. Three
sides alternate, each in its own process:

    relay                sequences packed on one axis, no padding
    transformers         its own implementation (sdpa), padded to the longest sequence of each
                         micro-batch, in the given order
    transformers_sorted  the same, longest sequences first, so that there is little padding

Padding does not count as tokens. Peak memory is allocated memory on a GPU, resident memory beyond
imports on a CPU. Model FLOPs utilisation (`mfu`, on a GPU) is 6 N a token + 12 layers x heads x
head size x length over the device's rate (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B).
The losses of the first step must agree. The last line is a JSON object; `ratio` is relay's speed
over each of the others', by the order of their sequences.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.processes import Worker

FLAVORS = {"tiny": 1024, "small": 40_960, "0.6B": 40_960, "1.7B": 40_960, "SmolLM2-135M": 8192}
"""Longest sequence by flavor, of Llama where it is SmolLM2's, else of Qwen3."""
NAMES = ("relay", "transformers", "transformers_sorted")
NUM_WARMUP_STEPS = 2
"""Steps at the start that are not measured: they allocate and compile."""

TakeTurn = Callable[[int], dict[str, Any]]
"""Function that runs the given number of steps of a side and returns the median `step_s`, all
`losses` and the `peak_memory_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One batch on one device, the same for every side."""

    flavor: str
    device: str
    dtype: str
    min_length: int
    max_length: int
    """Smallest and largest number of inputs, and so of targets, of a sequence."""
    tokens: int
    """Smallest number of tokens of the batch."""
    microbatch_tokens: int
    """Largest number of tokens of a micro-batch, padding included."""
    logits_chunk_tokens: int | None
    """Tokens per chunk of the engine's logits; None computes all logits of a micro-batch at once.
    """
    compile: bool
    seed: int = 0

    def __post_init__(self) -> None:
        given = f"lengths={self.min_length} {self.max_length}: must be"
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"{given} at least 1, the smaller one first")
        if self.max_length > (longest := FLAVORS[self.flavor]):
            raise ValueError(f"{given} at most {longest}, the positions of {self.flavor}")
        if self.microbatch_tokens < self.max_length:
            raise ValueError(
                f"microbatch_tokens={self.microbatch_tokens}: must hold the longest sequence, "
                f"{self.max_length} tokens"
            )

    def lengths(self) -> list[int]:
        """Return the lengths of the sequences in order, drawn uniformly between the bounds."""
        draw = random.Random(self.seed)
        lengths: list[int] = []
        while sum(lengths) < self.tokens:
            lengths.append(draw.randint(self.min_length, self.max_length))
        return lengths

    def loss_tolerance(self) -> float:
        """Return the largest relative difference between the first losses of two sides."""
        if self.dtype != "float32":
            return 1e-2
        return 1e-4 if self.compile else 1e-5


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        workload = workload_of(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    repeats, steps = (3, 1) if args.quick else (args.repeats, args.steps)
    with ExitStack() as stack:
        # Named, as this process does not import PyTorch.
        runner = "benchmarks.train_step_sides:Runner"
        settings: dict[str, Any] = {
            "threads": args.threads,
            "workload": asdict(workload),
            "num_threads": args.threads,
        }
        workers = {
            name: stack.enter_context(Worker(runner, name=name, **settings)) for name in NAMES
        }
        result = compare(
            workload,
            facts=workers["relay"].call("describe"),
            sides={name: partial(worker.call, "turn") for name, worker in workers.items()},
            repeats=repeats,
            steps=steps,
            threads=args.threads,
        )
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument(
        "--quick", action="store_true", help="a small batch, three steps of each side"
    )
    options.add_argument("--flavor", choices=tuple(FLAVORS), help="small on a CPU, 0.6B on a GPU")
    options.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    options.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "mixed"),
        help="float32 on a CPU, bfloat16 on a GPU",
    )
    lengths = options.add_mutually_exclusive_group()
    lengths.add_argument("--sequence-length", type=int, metavar="N", help="of each; 4096 on a GPU")
    lengths.add_argument(
        "--lengths", type=int, nargs=2, metavar=("LO", "HI"), help="16 256 on a CPU"
    )
    options.add_argument(
        "--tokens", type=int, help="of a step, at least; 8192 on a CPU, 65536 on a GPU"
    )
    options.add_argument(
        "--microbatch-tokens",
        type=int,
        help="at most, padding counted; 4096 on a CPU, with --quick 512, 8192 on a GPU",
    )
    options.add_argument(
        "--logits-chunk-tokens", type=int, help="of the engine's head; not chunked"
    )
    options.add_argument(
        "--compile", action="store_true", help="torch.compile blocks and loss, on all sides"
    )
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
    for name in ("tokens", "threads", "repeats", "steps"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"{name}={number}: must be at least 1")
    fallback: dict[str, Any] = {
        "flavor": "small" if on_cpu else "0.6B",
        "dtype": "float32" if on_cpu else "bfloat16",
        "tokens": (1024 if args.quick else 8192) if on_cpu else (16_384 if args.quick else 65_536),
        "microbatch_tokens": (512 if args.quick else 4096) if on_cpu else 8192,
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


class LossesDifferError(RuntimeError):
    """The sides compute different losses, so their speeds cannot be compared."""


def compare(
    workload: Workload,
    *,
    facts: Mapping[str, Any],
    sides: Mapping[str, TakeTurn],
    repeats: int,
    steps: int,
    threads: int,
) -> dict[str, Any]:
    """Warm up all sides, compare their losses, measure them in turns and return the benchmark's
    last line.

    Raises:
        LossesDifferError: their first losses differ.
    """
    warm_ups = {name: turn(NUM_WARMUP_STEPS)["losses"] for name, turn in sides.items()}
    first = {name: losses[0] for name, losses in warm_ups.items()}
    first_difference = largest_difference(first)
    if not first_difference <= workload.loss_tolerance():  # NaN is not
        raise LossesDifferError(
            f"losses of the first step are {first}: they differ by more than "
            f"{workload.loss_tolerance():g}"
        )
    lengths = workload.lengths()
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, turn in sides.items():
            turns[name].append(measured := turn(steps))
            speed, peak = sum(lengths) / measured["step_s"], measured["peak_memory_bytes"] / 2**30
            print(f"repeat {repeat + 1}: {name} {speed:.0f} tokens/s, {peak:.2f} GiB", flush=True)

    def median(key: str) -> dict[str, float]:
        return {name: statistics.median(turn[key] for turn in of) for name, of in turns.items()}

    step_s = median("step_s")
    tokens_per_s = {name: sum(lengths) / seconds for name, seconds in step_s.items()}
    last = {name: of[-1]["losses"][-1] for name, of in turns.items()}
    peak_flops = facts["peak_flops"]
    return {
        "benchmark": "train_step",
        **facts,
        **asdict(workload),
        "threads": threads,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "repeats": repeats,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "peak_memory_gib": {
            name: peak / 2**30 for name, peak in median("peak_memory_bytes").items()
        },
        "loss_difference": {"first": first_difference, "last": largest_difference(last)},
        "compared": "tokens/s of training: relay over transformers",
        "ratio": {
            "given": tokens_per_s["relay"] / tokens_per_s["transformers"],
            "sorted": tokens_per_s["relay"] / tokens_per_s["transformers_sorted"],
        },
        "mfu": peak_flops
        and {name: facts["step_flops"] / seconds / peak_flops for name, seconds in step_s.items()},
    }


def largest_difference(losses: Mapping[str, float]) -> float:
    """Return the largest relative difference from relay's loss; NaN if any loss is NaN."""
    differences = [abs(loss - losses["relay"]) / abs(losses["relay"]) for loss in losses.values()]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def padded_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, by_length: bool = False
) -> list[list[int]]:
    """Split sequences, in the given order or longest first, into micro-batches whose padded grid
    fits.
    """
    order = range(len(lengths))
    plan: list[list[int]] = []
    longest = 0
    for index in sorted(order, key=lambda i: -lengths[i]) if by_length else order:
        longest = max(longest, lengths[index])
        if not plan or (len(plan[-1]) + 1) * longest > max_tokens:
            plan.append([])
            longest = lengths[index]
        plan[-1].append(index)
    return plan


if __name__ == "__main__":
    main()
