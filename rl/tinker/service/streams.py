"""One model's requests, in the order of their seq ids.

Consumes requests as they come: the first chunk of a batch often last, some twice, some never.
Produces their results, each request begun when the one before it has ended, well or badly.
Waits for the next seq id, while later ones are held, at most `gap_timeout_s` from when they could first have
run. Then the missing ones are lost. What is held fails as well: an `optim_step` among it would step with
part of a batch. The gradient that the model has accumulated is of such a batch, so it is dropped, and the
stream goes on after the last seq id that was held. A lost one that comes later fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rl.tinker.service.background import Background
from rl.tinker.service.futures import Futures, Request, fail_all
from rl.tinker.service.responses import Response

Work = Callable[[], Awaitable[Response]]


class Stream:
    def __init__(
        self,
        name: str,
        *,
        futures: Futures,
        background: Background,
        gap_timeout_s: float,
        after_gap: Callable[[], Awaitable[None]],
    ) -> None:
        """`name` is the model's id; `after_gap` drops what was accumulated before a gap."""
        self._name = name
        self._futures = futures
        self._background = background
        self._gap_timeout_s = gap_timeout_s
        self._after_gap = after_gap
        self._next = 0
        self._held: dict[int, tuple[Request, Work]] = {}
        self._lost: list[range] = []
        self._had_gap = False
        self._task: asyncio.Task[None] | None = None
        self._gap: asyncio.TimerHandle | None = None
        self._ended: str | None = None

    def unblocks(self, seq_id: int) -> bool:
        """Something later is held that cannot run before it has come."""
        missing = self._next
        while missing in self._held:
            missing += 1
        return seq_id == missing and any(held > seq_id for held in self._held)

    def has_passed(self, seq_id: int) -> bool:
        """It was done, or refused, some time ago."""
        return seq_id < self._next and not self._was_lost(seq_id)

    def submit(self, seq_id: int, request: Request, work: Work) -> None:
        """Take on a seq id that has not come before."""
        if self._ended is not None:
            self._fail((request,), self._ended)
        elif seq_id < self._next:
            self._fail(
                (request,),
                f"seq_id {seq_id} came too late: later requests waited {self._gap_timeout_s:g} s for it "
                "and failed",
            )
        else:
            self._held[seq_id] = request, work
            self._go_on()

    def refuse(self, seq_id: int, request: Request, error: str) -> None:
        """A request that is wrong takes its turn too, so that later ones do not wait for it."""

        async def refused() -> Response:
            raise AssertionError("its result was there before")

        self._fail((request,), error)
        if self._ended is None and seq_id >= self._next:
            self._held[seq_id] = request, refused
            self._go_on()

    def end(self, error: str) -> None:
        """What waits fails, as does what comes; what runs is finished."""
        if self._ended is None:
            self._ended = error
            self._stop_waiting()
            self._fail_held(error)

    async def idle(self) -> None:
        """Return when nothing runs."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _go_on(self) -> None:
        if self._ended is not None:
            return
        if self._task is None and (self._next in self._held or self._had_gap):
            self._stop_waiting()
            self._task = self._background.start(self._work_off(), f"work of {self._name}")
            self._task.add_done_callback(self._stopped)
        elif self._task is None and self._held and self._gap is None:
            loop = asyncio.get_running_loop()
            self._gap = loop.call_later(self._gap_timeout_s, self._give_up)

    async def _work_off(self) -> None:
        if self._had_gap:
            self._had_gap = False
            await self._after_gap()
        while (held := self._held.pop(self._next, None)) is not None:
            self._next += 1
            request, work = held
            if request.result is None:
                await self._futures.run(request, work)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self.end("the service is closing")
        self._go_on()

    def _give_up(self) -> None:
        self._gap = None
        come = sorted(self._held)
        missing = [range(a + 1, b) for a, b in zip([self._next - 1, *come], come, strict=False) if a + 1 < b]
        self._lost += missing
        self._next = come[-1] + 1
        self._fail_held(
            f"seq_id {_ranges(missing)} of {self._name} did not come within {self._gap_timeout_s:g} s, "
            "so what waited "
            "for it failed, and the gradient that was accumulated is dropped; requests after these run again"
        )
        self._had_gap = True
        self._go_on()

    def _was_lost(self, seq_id: int) -> bool:
        return any(seq_id in lost for lost in self._lost)

    def _stop_waiting(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
            self._gap = None

    def _fail_held(self, error: str) -> None:
        self._fail([request for request, _ in self._held.values()], error)
        self._held.clear()

    def _fail(self, requests: list[Request] | tuple[Request, ...], error: str) -> None:
        fail_all(self._futures, requests, error)


def _ranges(ranges: list[range]) -> str:
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in ranges]
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")
