"""Turns of an engine, which keep tensor-parallel ranks in step, and pauses between its steps.

With tensor parallelism each rank has its own engine, scheduler, cache and sampler in its own
process. They stay equal because rank 0 alone decides: before each engine step it broadcasts an
`EngineTurn`, and every rank does exactly what the turn says, in order. Each turn carries a digest
of the tokens that rank 0 drew in the step before; a rank that drew other tokens stops at once.
While nothing runs, rank 0 sends an empty turn from time to time. A rank that hears nothing for
longer than the deadline gives up; the connection to a dead rank closes at once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from actors.vllm.requests import Drawn, Request

IDLE_TURNS_PER_TIMEOUT = 4


class SilentRankError(ConnectionError, TimeoutError):
    """A connected rank did not take part within the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Time between two steps in which every rank writes weights, falls asleep or wakes."""

    version: int | None = None
    """Policy version of the weights that are written; None to sleep or wake."""
    asleep: bool = False
    """True to sleep; running requests finish first."""

    def __str__(self) -> str:
        if self.version is not None:
            return f"the update of the weights to version {self.version}"
        return "sleep" if self.asleep else "wake"


def _make_future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(kw_only=True, slots=True, eq=False)
class PauseRequest:
    """A pause that this rank's caller has asked for, and the three moments of its progress."""

    pause: Pause
    begun: asyncio.Future[bool] = field(default_factory=_make_future)
    """No step is running: the caller may change the engine."""
    changed: asyncio.Future[bool] = field(default_factory=_make_future)
    """The caller is done; True if it succeeded."""
    ended: asyncio.Future[bool] = field(default_factory=_make_future)
    """All ranks are done; True if all succeeded."""


class Pauses:
    """The pauses that callers of this rank have asked for and that are not over."""

    def __init__(self, changed: asyncio.Event) -> None:
        """`changed` is set when a pause is asked for."""
        self._changed = changed
        self._requests: list[PauseRequest] = []

    @property
    def bring_weights(self) -> bool:
        return any(request.pause.version is not None for request in self._requests)

    def add(self, pause: Pause) -> PauseRequest:
        request = PauseRequest(pause=pause)
        self._requests.append(request)
        self._changed.set()
        return request

    def choose_next(self) -> Pause | None:
        """Return the pause to begin, None if none is asked for."""
        # A caller that was cancelled before its pause began changes nothing.
        self._requests = [request for request in self._requests if not request.begun.cancelled()]

        # Weights first, as they cannot be written once the engine sleeps.
        for request in self._requests:
            if request.pause.version is not None:
                return request.pause
        return self._requests[0].pause if self._requests else None

    async def wait_for_request(self, pause: Pause, *, rank: int, timeout_s: float) -> PauseRequest:
        """Wait for this rank's request for the pause that rank 0 decided on, and return it."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    for request in self._requests:
                        if request.pause == pause:
                            return request
                    await self._changed.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {rank}: rank 0 begins {pause}, but this rank was not asked for it within "
                f"{timeout_s:g} s"
            ) from error

    def remove(self, request: PauseRequest) -> None:
        self._requests.remove(request)

    def fail(self, failure: Exception) -> None:
        """Fail every caller at the moment that it waits for."""
        for request in self._requests:
            future = request.ended if request.begun.done() else request.begun
            if not future.done():
                future.set_exception(failure)
        self._requests = []


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTurn:
    """Rank 0's decision on what every rank does next, in the order of the fields."""

    admit: tuple[Request, ...] = ()
    abort: tuple[int, ...] = ()
    """Ids of requests to end as they are."""
    step: bool = False
    """True to make an engine step."""
    pause: Pause | None = None
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
