"""What one owner may hold and how long the service waits."""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_SEQ_ID = 2**63 - 1
MAX_TTL_S = 10 * 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Counts are per owner where nothing else is said. Whatever exceeds one is refused with its name."""

    sessions: int = 100
    """That have not ended."""
    models: int = 16
    """In training at once."""
    sampling_sessions: int = 100_000
    """Of base models, snapshots and saved weights, in sessions that have not ended."""
    samplers_per_model: int = 8
    """Snapshots without a name that one model keeps in memory. The next one closes the oldest; whoever
    samples from that is told so."""
    saved_samplers: int = 8
    """Saved sampler weights open at once. The one that was used longest ago is closed for the next, and
    opened again when it is asked for."""

    waiting: int = 8192
    """Requests that have no result yet."""
    waiting_per_model: int = 1024
    waiting_bytes: int = 4 * 2**30
    """Of the tensors in requests that have no result yet."""
    data_per_request: int = 16_384
    tokens_per_request: int = 8_000_000
    """Of all data of a `forward_backward`, of a sample's prompt, or of the likeliest tokens of a prompt."""
    samples_per_request: int = 1024
    results: int = 16_384
    """Kept until they are retrieved or `result_kept_s` is over; the oldest are forgotten first."""
    result_bytes: int = 2**30

    checkpoints: int = 10_000
    storage_bytes: int | None = None
    """Of all checkpoints; a save begins only below it. None is no limit."""
    name_length: int = 128
    metadata_bytes: int = 65_536
    """Of a session's, run's or checkpoint's metadata as JSON."""

    session_timeout_s: float | None = None
    """A session that nobody was heard of for so long ends. None: only when it is finished."""
    gap_timeout_s: float = 300.0
    """Requests wait so long for an earlier one of their model that has not come. Clients repeat a request
    that did not come through for five minutes."""
    result_kept_s: float = 900.0
    """After the first retrieval; one whose answer was lost can be repeated."""
    close_timeout_s: float = 10.0
    """For everything under way when the service closes, and for the backend afterwards."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value!r}; a limit is a number above 0")
        if self.name_length > 128:
            raise ValueError(f"name_length is {self.name_length}; file systems take names up to 128")
