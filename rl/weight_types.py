"""Results of a weight sync: checksums of boxes, and the times of pushes and pulls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSum:
    """Checksum of the box of a tensor that a rank sent or received (`rl.weights.checksum`)."""

    name: str
    dtype: str
    """Type of the elements, such as "bfloat16"."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PullResult:
    """All generators have pulled a version and passed the parity check."""

    parity_diff: float | None = None
    """Largest mean difference of any generator's logprobs of a fixed text from the trainer's, in
    nats a token; None if it was not checked."""
    parity_s: float = 0.0
    """Seconds that the check took after the pulls."""
    num_bytes: int | None = None
    """Bytes of the version, which the trainer's ranks have pushed."""
    merge_lost: float | None = None
    """Share of the adapters' update that rounding to the generators' dtype has lost
    (`rl.training.merge`); None without merged adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """Times of a push and all its pulls, after which every generator serves the version."""

    policy_version: int
    push_s: float
    pull_s: float
    parity_diff: float | None = None
    parity_s: float = 0.0
    """Seconds of the parity check, as in `PullResult`; not part of `pull_s`."""
    num_bytes: int | None = None
    """As in `PullResult`."""
    merge_lost: float | None = None
    """As in `PullResult`."""
