"""Workload and figures of `benchmarks.train_step`."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLAVORS = {"tiny": 1024, "small": 40_960, "0.6B": 40_960, "1.7B": 40_960}
"""Longest sequence by flavor."""
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 FLOP/s by NVIDIA's data sheets; the first key contained in the device's name applies."""


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
    """Tokens per chunk of the engine's logits; None computes all logits of a micro-batch at once."""
    compile: bool
    seed: int = 0

    def __post_init__(self) -> None:
        if self.flavor not in FLAVORS:
            raise ValueError(f"flavor={self.flavor!r}: must be one of {', '.join(FLAVORS)}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"lengths={self.min_length} {self.max_length}: must be at least 1, the smaller one first"
            )
        if self.max_length > FLAVORS[self.flavor]:
            raise ValueError(
                f"lengths={self.min_length} {self.max_length}: must be at most {FLAVORS[self.flavor]}, "
                f"the positions of {self.flavor}"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: must be at least 1")
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


def padded_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, by_length: bool = False
) -> list[list[int]]:
    """Split sequences, in the given order or longest first, into micro-batches whose padded grid fits."""
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


def step_flops(
    lengths: Sequence[int], *, parameters: int, layers: int, heads: int, head_dim: int, causal: bool
) -> float:
    """Return the floating-point operations of a forward and backward pass without recomputation.

    6 N a token for its products with N parameters, and 12 layers x heads x head_dim x length for
    attention to all tokens of its sequence (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B).
    Half of the latter if `causal`: only what a token may see.

    Args:
        parameters: all of a model whose output head is its embedding.
    """
    attention = 12 * layers * heads * head_dim * sum(length * length for length in lengths)
    return 6.0 * parameters * sum(lengths) + attention / (2 if causal else 1)


def listed_peak(device_name: str, dtype: str) -> float | None:
    """Return the entry of `PEAK_FLOPS`, or None for another device or dtype."""
    if dtype != "bfloat16":
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Properties that all sides share."""

    hardware: str
    torch_version: str
    transformers_version: str
    parameters: int
    step_flops: float
    step_flops_causal: float
    peak_flops: float | None
    """Peak FLOP/s of the device by its data sheet, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Measurement of a few steps of one side."""

    step_s: float
    """Median seconds of a step."""
    losses: list[float]
    peak_memory_bytes: int


class LossesDifferError(RuntimeError):
    """The sides compute different losses, so their speeds cannot be compared."""


def loss_differences(losses: Mapping[str, Sequence[float]], *, tolerance: float) -> dict[str, float]:
    """Return the largest relative difference from the first side, for the first step's loss and the last's.

    Raises:
        LossesDifferError: the losses of the first step differ by more than `tolerance`.
    """
    reference = next(iter(losses.values()))
    relative = {
        when: [abs(values[i] - reference[i]) / abs(reference[i]) for values in losses.values()]
        for when, i in (("first", 0), ("last", -1))
    }
    if not all(difference <= tolerance for difference in relative["first"]):  # NaN is not
        first = {name: values[0] for name, values in losses.items()}
        raise LossesDifferError(
            f"losses of the first step are {first}: they differ by more than {tolerance:g}"
        )
    return {when: max(values) for when, values in relative.items()}


def loss_tolerance(workload: Workload) -> float:
    if workload.dtype != "float32":
        return 1e-2
    return 1e-4 if workload.compile else 1e-5


def figures(
    workload: Workload,
    *,
    facts: Facts,
    turns: Mapping[str, Sequence[Turn]],
    differences: Mapping[str, float],
    threads: int,
) -> dict[str, Any]:
    """Return the benchmark's last line; `turns` are the measured ones, relay's first."""
    lengths = workload.lengths()
    step_s = {name: statistics.median(turn.step_s for turn in of) for name, of in turns.items()}
    tokens_per_s = {name: sum(lengths) / seconds for name, seconds in step_s.items()}
    result: dict[str, Any] = {
        "benchmark": "train_step",
        "hardware": facts.hardware,
        "torch": facts.torch_version,
        "transformers": facts.transformers_version,
        "threads": threads,
        "flavor": workload.flavor,
        "parameters": facts.parameters,
        "dtype": workload.dtype,
        "compile": workload.compile,
        "lengths": [workload.min_length, workload.max_length],
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "microbatch_tokens": workload.microbatch_tokens,
        "logits_chunk_tokens": workload.logits_chunk_tokens,
        "repeats": min(len(of) for of in turns.values()),
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "peak_memory_gib": {
            name: statistics.median(turn.peak_memory_bytes for turn in of) / 2**30
            for name, of in turns.items()
        },
        "loss_difference": dict(differences),
        "ratio": tokens_per_s["relay"] / tokens_per_s["transformers"],
        "ratio_sorted": tokens_per_s["relay"] / tokens_per_s["transformers_sorted"],
    }
    if facts.peak_flops is not None:
        result["peak_flops"] = facts.peak_flops
        for name, flops in (("mfu", facts.step_flops), ("mfu_causal", facts.step_flops_causal)):
            result[name] = {side: flops / seconds / facts.peak_flops for side, seconds in step_s.items()}
    return result
