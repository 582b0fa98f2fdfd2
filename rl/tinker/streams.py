"""One model's requests, in the order of their seq ids.

Requests arrive in any order: the first chunk of a batch often last, some twice, some never. Each one begins when
the one before it has ended, well or badly. Later requests wait for a missing seq id at most `gap_timeout_s`, from
the moment they could run. Then the missing ones count as lost, and the waiting ones fail: an `optim_step` among
them would step with part of a batch. The accumulated gradient is part of such a batch and is dropped. The stream
goes on after the last waiting seq id; a missing request that arrives later is never done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rl.tinker.futures import Request, Result
from rl.tinker.parts import Parts

Work = Callable[[], Awaitable[Result]]


class Stream:
    def __init__(self, model_id: str, parts: Parts) -> None:
        self._model_id = model_id
        self._parts = parts
        self._futures = parts.futures
        self._gap_timeout_s = parts.limits.gap_timeout_s
        self._next = 0
        self._held: dict[int, tuple[Request, Work]] = {}
        self._had_gap = False
        self._task: asyncio.Task[None] | None = None
        self._gap: asyncio.TimerHandle | None = None
        self._ended: str | None = None

    def unblocks(self, seq_id: int) -> bool:
        """Return whether later requests wait for this seq id."""
        missing = self._next
        while missing in self._held:
            missing += 1
        return seq_id == missing and any(held > seq_id for held in self._held)

    def has_passed(self, seq_id: int) -> bool:
        """Return whether this seq id was done, refused or given up some time ago."""
        return seq_id < self._next

    def submit(self, seq_id: int, request: Request, work: Work) -> None:
        """Accept a seq id that has not come before."""
        if self._ended is not None:
            self._futures.fail([request], self._ended)
        else:
            self._held[seq_id] = request, work
            self._advance()

    def refuse(self, seq_id: int, request: Request, error: str) -> None:
        """Fail an invalid request, and let it use up its seq id so that later ones do not wait for it."""

        async def refused() -> Result:
            raise AssertionError("the request has failed already")

        self._futures.fail([request], error)
        if self._ended is None and seq_id >= self._next:
            self._held[seq_id] = request, refused
            self._advance()

    def end(self, error: str) -> None:
        """Fail what waits and what arrives later; what runs is finished."""
        if self._ended is None:
            self._ended = error
            self._stop_waiting()
            self._fail_held(error)

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _advance(self) -> None:
        if self._ended is not None:
            return
        if self._task is None and (self._next in self._held or self._had_gap):
            self._stop_waiting()
            self._task = self._parts.background.start(self._run_ready(), f"work of {self._model_id}")
            self._task.add_done_callback(self._stopped)
        elif self._task is None and self._held and self._gap is None:
            loop = asyncio.get_running_loop()
            self._gap = loop.call_later(self._gap_timeout_s, self._give_up)

    async def _run_ready(self) -> None:
        if self._had_gap:
            self._had_gap = False
            await self._parts.backend.drop_gradient(self._model_id)
        while (held := self._held.pop(self._next, None)) is not None:
            self._next += 1
            request, work = held
            if request.result is None:
                await self._futures.run(request, work)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self.end("the service is closing")
        self._advance()

    def _give_up(self) -> None:
        self._gap = None
        first, last = self._next, max(self._held)
        missing = next(seq_id for seq_id in range(first, last) if seq_id not in self._held)
        self._next = last + 1
        self._fail_held(
            f"seq_id {missing} of {self._model_id} did not come within {self._gap_timeout_s:g} s, so the requests "
            "after it failed and the accumulated gradient is dropped; later requests run again"
        )
        self._had_gap = True
        self._advance()

    def _stop_waiting(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
            self._gap = None

    def _fail_held(self, error: str) -> None:
        self._futures.fail([request for request, _ in self._held.values()], error)
        self._held.clear()
