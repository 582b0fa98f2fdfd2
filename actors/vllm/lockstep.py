"""Turns of an engine, which keep tensor-parallel ranks in step.

With tensor parallelism each rank has its own engine, scheduler, cache and sampler in its own
process. They stay equal because rank 0 alone decides: before each engine step it broadcasts an
`EngineTurn`, and every rank does exactly what the turn says, in order. Each turn carries a digest
of the tokens that rank 0 drew in the step before; a rank that drew other tokens stops at once.
While nothing runs, rank 0 sends an empty turn from time to time. A rank that hears nothing for
longer than the deadline gives up; the connection to a dead rank closes at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from actors.vllm.pauses import Pause
from actors.vllm.requests import Drawn, Request

IDLE_TURNS_PER_TIMEOUT = 4


class SilentRankError(ConnectionError, TimeoutError):
    """A connected rank did not take part within the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTurn:
    """Rank 0's decision on what every rank does next, in the order of the fields."""

    admit: tuple[Request, ...] = ()
    abort: tuple[int, ...] = ()
    """Ids of requests to end as they are."""
    step: bool = False
    """True to make an engine step."""
    drop: tuple[int, ...] = ()
    """Adapters to free, after the step."""
    pause: Pause | None = None
    refusal: str | None = None
    """Why the pause is refused to its callers."""
    stop: bool = False
    """True in the last turn."""


class Lockstep:
    """One rank's end of the turn protocol. With a single rank it does nothing."""

    def __init__(self, *, rank: int, size: int, timeout_s: float) -> None:
        """Make the process group; all ranks call it at the same point."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._digest = 0
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None

    @property
    def idle_turn_s(self) -> float | None:
        """Seconds between empty turns; None where there are no other ranks."""
        return self.timeout_s / IDLE_TURNS_PER_TIMEOUT if self.size > 1 else None

    def exchange(self, turn: EngineTurn | None) -> EngineTurn:
        """Return rank 0's next turn on every rank; rank 0 passes it.

        Raises:
            ConnectionError: a rank is gone, or was silent for `timeout_s`.
            RuntimeError: this rank drew other tokens than rank 0.
        """
        message: list[Any] = [turn, self._digest]
        if self._group is not None:
            with self._name_wait("rank 0's next turn"):
                dist.broadcast_object_list(message, src=0, group=self._group)

        decided, digest = message
        # Compared a step late: the digest travels with the next turn, at no cost of its own.
        if digest != self._digest:
            raise RuntimeError(
                f"generator rank {self.rank} drew other tokens than rank 0 "
                f"(digest {self._digest:#x}, rank 0 has {digest:#x})"
            )
        assert isinstance(decided, EngineTurn)
        return decided

    def record(self, drawn: Drawn) -> None:
        """Add a step's tokens to the digest that is compared at the next turn."""
        if self._group is not None:
            pairs = [(request_id, token) for request_id, token, _ in drawn.tokens]
            tokens = np.array(pairs, dtype=np.int64)
            self._digest = zlib.crc32(tokens.tobytes(), self._digest)

    def all_agree(self, ok: bool) -> bool:
        """Return whether `ok` is true on all ranks.

        Raise ConnectionError if a rank is lost or silent.
        """
        if self._group is None:
            return ok
        answer = torch.tensor(int(ok))
        with self._name_wait("the other ranks' result of a weight update"):
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())

    @contextmanager
    def _name_wait(self, what: str) -> Iterator[None]:
        """Turn gloo's errors into errors that say which rank waited, for what and how long."""
        try:
            yield
        except RuntimeError as error:
            # gloo raises the same class for a timeout and for a closed connection.
            kind = SilentRankError if "timed out" in str(error).lower() else ConnectionError
            raise kind(
                f"generator rank {self.rank} awaited {what}, at most {self.timeout_s:g} s: {error}"
            ) from error
