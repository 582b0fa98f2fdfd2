"""What `benchmarks.train_step` measures: the workload, and the figures made of the measured turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLAVORS = {"tiny": 1024, "small": 40_960, "0.6B": 40_960, "1.7B": 40_960}
"""By name the longest sequence."""
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Per second, dense bfloat16, as NVIDIA's data sheets say; the first name that the device's contains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One batch on one device; the same for every side."""

    flavor: str
    device: str
    dtype: str
    min_length: int
    max_length: int
    """Inputs of a sequence; the targets are as many."""
    tokens: int
    """The batch has at least as many, as few sequences as reach it."""
    microbatch_tokens: int
    """Most tokens of a micro-batch, padding counted."""
    logits_chunk_tokens: int | None
    """Of the engine's head; None computes all logits of a micro-batch at once."""
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
        """Of the sequences in order, drawn evenly between the bounds."""
        draw = random.Random(self.seed)
        lengths: list[int] = []
        while sum(lengths) < self.tokens:
            lengths.append(draw.randint(self.min_length, self.max_length))
        return lengths


def padded_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, by_length: bool = False
) -> list[list[int]]:
    """Sequences in the given order, or longest first, as many to a micro-batch as its padded grid holds."""
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
    """Floating-point operations that a step needs, forward and backward, nothing computed twice.

    6 N a token for its products with N parameters, and 12 layers x heads x head_dim x length for
    attention to all tokens of its sequence (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B).
    Half of the latter if `causal`: only what a token may see.

    Args:
        parameters: all of a model whose output head is its embedding.
    """
    attention = 12 * layers * heads * head_dim * sum(length * length for length in lengths)
    return 6.0 * parameters * sum(lengths) + attention / (2 if causal else 1)


def listed_peak(device_name: str, dtype: str) -> float | None:
    """Of `PEAK_FLOPS`; None for a device or dtype that is not in it."""
    if dtype != "bfloat16":
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What all sides have in common."""

    hardware: str
    torch_version: str
    transformers_version: str
    parameters: int
    step_flops: float
    step_flops_causal: float
    peak_flops: float | None
    """Of the device, per second; None on a CPU."""
    peak_source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A few steps of one side."""

    step_s: float
    """Median of the steps."""
    losses: list[float]
    peak_memory_bytes: int


class LossesDifferError(RuntimeError):
    """The sides do not compute the same, so their speeds say nothing."""


def loss_differences(losses: Mapping[str, Sequence[float]], *, tolerance: float) -> dict[str, float]:
    """Of every side from the first one: relative, of the first step's loss and of the last's.

    Raises:
        LossesDifferError: the first steps' differ by more than `tolerance`.
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
    """The benchmark's last line; `turns` are the measured ones, of relay first."""
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
        result["peak_flops"], result["peak_source"] = facts.peak_flops, facts.peak_source
        for name, flops in (("mfu", facts.step_flops), ("mfu_causal", facts.step_flops_causal)):
            result[name] = {side: flops / seconds / facts.peak_flops for side, seconds in step_s.items()}
    return result
