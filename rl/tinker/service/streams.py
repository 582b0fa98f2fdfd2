"""A model in training, and the order of its requests.

Requests arrive in any order, some twice, some never; each begins when the one before it has ended.
Later requests wait for a missing seq id at most `gap_timeout_s`, from the moment they could run.
Then the missing ones count as lost, the waiting ones fail and the accumulated gradient is dropped,
as both may be part of an incomplete batch. The model goes on after the last waiting seq id; a
missing request that arrives later is never done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rl.tinker.backend import TinkerBackend
from rl.tinker.service.futures import Answer, Background, Futures, PendingRequest
from rl.tinker.service.storage import RunRecord
from rl.tinker.types import (
    Future,
    GoneError,
    InvalidRequestError,
    ModelSettings,
    TinkerError,
    check_seq_id,
)

Run: TypeAlias = Callable[[], Awaitable[Answer]]
"""Work of a request, which begins when its turn has come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    request: PendingRequest
    run: Run
    adds_gradient: bool


class ModelStream:
    """A model in training: a task that does its requests in the order of their seq ids, until
    `end`.

    Request 0 creates the model in the backend; after the last one the task deletes it there. A
    repeated seq id is the same request and is done once, whatever the repetition says.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        backend: TinkerBackend,
        futures: Futures,
        background: Background,
        gap_timeout_s: float,
    ) -> None:
        """
        Args:
            background: runs the task of the model.
            gap_timeout_s: time in seconds that later requests wait for a missing seq id.
        """
        self.record = record
        self.is_created = False
        self.failed: list[int] = []
        """Seq ids of failed requests that would have added to the gradient of the next step."""
        self.ended: str | None = None
        """Reason why the model accepts no more requests."""
        self._backend = backend
        self._futures = futures
        self._gap_timeout_s = gap_timeout_s
        self._next = 0
        self._waiting: dict[int, _Waiting] = {}
        self._had_gap = False
        self._changed = asyncio.Event()
        self.task = background.start(self._run(), f"work of {self.model_id}")

    @property
    def model_id(self) -> str:
        """Id of the model, with which the ids of its requests begin."""
        return self.record.model_id

    @property
    def owner(self) -> str:
        """Hash of the key that the model belongs to, as everywhere behind the HTTP layer."""
        return self.record.owner_hash

    @property
    def settings(self) -> ModelSettings:
        """Base model and adapters."""
        return self.record.settings

    @property
    def num_bytes(self) -> int:
        """Bytes of trained weights, gradient and optimizer state, which are float32."""
        return 16 * self._backend.base_model.count_trained(self.settings.lora)

    @property
    def in_memory(self) -> bool:
        """True until the backend has deleted the model."""
        return not self.task.done()

    def start(self, request: PendingRequest, run: Run) -> None:
        """Queue request 0, which creates the model."""
        self._add(0, request, run, adds_gradient=False)

    def submit(
        self, seq_id: int | None, run: Run, *, num_bytes: int = 0, adds_gradient: bool = False
    ) -> Future:
        """Queue a request; the answer comes by `retrieve_future`.

        Args:
            num_bytes: bytes of the data that `run` holds.

        Raises:
            GoneError: the model has ended.
            BusyError: too much work is waiting. Its seq id is not used up.
        """
        future, _ = self._accept(seq_id, run, num_bytes=num_bytes, adds_gradient=adds_gradient)
        return future

    def refuse(
        self, seq_id: int | None, error: TinkerError, *, adds_gradient: bool = False
    ) -> Future:
        """Raise an error, unless its request is repeated, and let the request fail in its turn.

        An invalid request uses up its seq id like any other, so that later ones do not wait for it.
        """

        async def fail() -> Answer:
            raise InvalidRequestError(str(error))

        future, is_new = self._accept(seq_id, fail, adds_gradient=adds_gradient)
        if is_new:
            raise error
        return future

    def _accept(
        self, seq_id: int | None, run: Run, *, num_bytes: int = 0, adds_gradient: bool
    ) -> tuple[Future, bool]:
        """Queue a request unless it is repeated; return False with a repeated one."""
        number = check_seq_id("seq_id", seq_id, first=1)
        future = Future(request_id=f"{self.model_id}:{number}", model_id=self.model_id)
        if future.request_id in self._futures:
            return future, False
        if self.ended is not None:
            raise GoneError(self.gone)
        if number < self._next:  # It was done, refused or given up some time ago.
            return future, False

        request = self._futures.begin(
            future.request_id,
            owner=self.owner,
            num_bytes=num_bytes,
            # All others wait for this seq id, so it alone may exceed the limits.
            unblocks=number == self._next and bool(self._waiting),
        )
        self._add(number, request, run, adds_gradient=adds_gradient)
        return future, True

    def _add(self, number: int, request: PendingRequest, run: Run, *, adds_gradient: bool) -> None:
        self._waiting[number] = _Waiting(request=request, run=run, adds_gradient=adds_gradient)
        self._changed.set()

    def end(self, why: str) -> None:
        """Fail what waits and what arrives later; what runs is finished. Idempotent."""
        if self.ended is None:
            self.ended = why
            self._fail_waiting(self.gone)
            self._changed.set()

    @property
    def gone(self) -> str:
        """Text for a client that uses a model that has ended."""
        return f"model {self.model_id} is no longer there: {self.ended}"

    async def _run(self) -> None:
        try:
            while self.ended is None:
                if await self._is_next_here():
                    await self._do(self._waiting.pop(self._next))
        finally:
            # Also where the task is cancelled: nothing may wait for a stream that does no work.
            self.end("the service is closing")
            if self.is_created:
                async with self._backend.lock_trainer(self.owner) as trainer:
                    await trainer.delete_model(self.model_id)

    async def _is_next_here(self) -> bool:
        """Wait for the next request; return False at the end and after a gap."""
        try:
            async with asyncio.timeout(None) as gap:
                while self._next not in self._waiting and self.ended is None:
                    # From here on the waiting requests could run, but for the missing one.
                    if self._waiting and gap.when() is None:
                        gap.reschedule(asyncio.get_running_loop().time() + self._gap_timeout_s)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._give_up()
        return self._next in self._waiting

    async def _do(self, one: _Waiting) -> None:
        seq_id = self._next
        # Before the work, so that a repetition of this request is known as one.
        self._next += 1
        await self._futures.run(one.request, partial(self._run_after_gap, one.run))
        result = one.request.result
        if result is not None and result.error is not None:
            # The next step would be one of part of a batch (training.py refuses it).
            if one.adds_gradient:
                self.failed.append(seq_id)
            if seq_id == 0:
                self.end(f"it could not be created: {result.error}")

    async def _run_after_gap(self, run: Run) -> Answer:
        # The gap has left part of a batch in the gradient.
        if self._had_gap:
            async with self._backend.lock_trainer(self.owner) as trainer:
                await trainer.drop_gradient(model_id=self.model_id)
            self._had_gap = False
        return await run()

    def _give_up(self) -> None:
        # All that wait fail, also those behind a second gap: they may be part of the same batch.
        first, last = self._next, max(self._waiting)
        missing = first
        while missing in self._waiting:
            missing += 1
        self._next = last + 1
        self._had_gap = True
        self._fail_waiting(
            f"seq_id {missing} of {self.model_id} did not come within {self._gap_timeout_s:g} s, "
            "so the requests after it failed and the accumulated gradient is dropped; later "
            "requests run again"
        )

    def _fail_waiting(self, error: str) -> None:
        for one in self._waiting.values():
            self._futures.fail(one.request, error)
        self._waiting.clear()
