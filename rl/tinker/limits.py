"""Limits on what one API key may hold, and on single HTTP requests."""

from __future__ import annotations

from dataclasses import dataclass, fields


def _check_positive(limits: Limits | HttpLimits) -> None:
    for name in (field.name for field in fields(limits)):
        value = getattr(limits, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value!r}: must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one API key. A refusal names the limit that it met."""

    sessions: int = 100
    """Sessions that have not ended."""
    models: int = 16
    """Models in training at once."""
    samplers: int = 8
    """Snapshots and saved weights open to sample from. The next one closes the least recently used one: a
    snapshot is then gone, saved weights open again with their next sample."""
    waiting: int = 8192
    """Requests without a result."""
    waiting_bytes: int = 4 * 2**30
    """Bytes of the requests without a result."""
    samples_per_request: int = 1024
    result_bytes: int = 2**30
    """Bytes of the results that are kept; the oldest go first."""
    storage_bytes: int | None = None
    """Bytes of all checkpoints, checked before each save; None is unlimited."""

    session_timeout_s: float | None = None
    """Silence after which a session ends; None: only when the client finishes it."""
    gap_timeout_s: float = 300.0
    """Wait for a model's missing earlier request; clients retry a request for five minutes."""
    result_kept_s: float = 900.0
    """Time a result can be retrieved."""
    close_timeout_s: float = 10.0
    """Wait for work in progress when the service closes, and for the backend afterwards."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits of single HTTP requests."""

    body_bytes: int = 64 * 2**20
    json_bytes: int = 8 * 2**20
    """Bytes of a JSON body, which is every body but that of `forward_backward`."""
    held_bytes: int = 2**30
    """Bytes of all bodies that are being read or answered."""
    body_timeout_s: float = 60.0
    values_per_request: int = 32 * 2**20
    """Numbers in the tensors of a `forward_backward`, once the sparse ones are dense."""
    chunk_data: int = 1024
    """Data per request that the client cuts larger batches into."""
    chunk_bytes: int = 5_000_000
    """Bytes per request that the client cuts larger batches into."""
    poll_s: float = 25.0
    """Longest wait for a result in one request; the client gives up on a request after 45 s."""

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.poll_s > 40.0:
            raise ValueError(f"poll_s={self.poll_s:g}: must be at most 40, the client's limit is 45")
