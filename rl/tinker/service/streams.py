"""A model in training, and the order of its requests.

Requests arrive in any order, some twice, some never; each begins when the one before it has ended.
Later requests wait for a missing seq id at most `gap_timeout_s`, from the moment they could run.
Then the missing ones count as lost, the waiting ones fail and the accumulated gradient is dropped,
as both may be part of an incomplete batch. The model goes on after the last waiting seq id; a
missing request that arrives later is never done.

The methods of `ModelStream` stand in the order in which a request meets them: `submit` accepts and
queues it, the stream's task waits for its turn (`_wait_for_next`) and completes it
(`_complete_next`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rl.tinker.backend import TinkerBackend
from rl.tinker.service.futures import AcceptedRequest, Answer, Background, Futures, Work
from rl.tinker.service.ledger import ModelLedger
from rl.tinker.service.storage import RunRecord
from rl.tinker.types import (
    Future,
    GoneError,
    InvalidRequestError,
    ModelSettings,
    TinkerError,
    check_seq_id,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _QueuedRequest:
    request: AcceptedRequest
    work: Work
    """Begins when the request's turn has come."""
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
        ledger: ModelLedger | None = None,
    ) -> None:
        """
        Args:
            background: runs the task of the model.
            ledger: records what the model trains.
            gap_timeout_s: time in seconds that later requests wait for a missing seq id.
        """
        self.record = record
        self.ledger = ledger
        self.is_created = False
        self.failed: list[int] = []
        """Seq ids of failed requests that would have added to the gradient of the next step."""
        self.ended: str | None = None
        """Reason why the model accepts no more requests."""
        self._backend = backend
        self._futures = futures
        self._gap_timeout_s = gap_timeout_s
        self._next = 0
        """Seq id of the next request to complete."""
        self._queue: dict[int, _QueuedRequest] = {}
        """Accepted requests by seq id."""
        self._had_gap = False
        """True from the end of the wait for a missing request until the gradient is dropped."""
        self._changed = asyncio.Event()
        self.task = background.start(self._process_queue(), f"work of {self.model_id}")

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

    @property
    def gone(self) -> str:
        """Text for a client that uses a model that has ended."""
        return f"model {self.model_id} is no longer there: {self.ended}"

    # Acceptance, in the client's call

    def submit_creation(self, request: AcceptedRequest, work: Work) -> None:
        """Queue request 0, which creates the model and was accepted before the stream was made."""
        self._enqueue(0, request, work, adds_gradient=False)

    def submit(
        self, seq_id: int | None, work: Work, *, num_bytes: int = 0, adds_gradient: bool = False
    ) -> Future:
        """Queue a request; the answer comes by `retrieve_future`.

        Args:
            num_bytes: bytes of the data that `work` holds.

        Raises:
            GoneError: the model has ended.
            BusyError: too much work is waiting. Its seq id is not used up.
        """
        future, _ = self._accept(seq_id, work, num_bytes=num_bytes, adds_gradient=adds_gradient)
        return future

    def refuse(
        self, seq_id: int | None, error: TinkerError, *, adds_gradient: bool = False
    ) -> Future:
        """Raise the error of an invalid request, which then fails in its turn; return the future of
        a repeated one that is queued or has its answer.

        An invalid request uses up its seq id like any other, so that later ones do not wait for it.
        """

        async def fail() -> Answer:
            raise InvalidRequestError(str(error))

        future, is_new = self._accept(seq_id, fail, adds_gradient=adds_gradient)
        # One that was given up has no answer that could be retrieved instead.
        if is_new or future.request_id not in self._futures:
            raise error
        return future

    def _accept(
        self, seq_id: int | None, work: Work, *, num_bytes: int = 0, adds_gradient: bool
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

        request = self._futures.accept(
            future.request_id,
            owner=self.owner,
            num_bytes=num_bytes,
            # All others wait for this seq id, so it alone may exceed the limits.
            unblocks=number == self._next and bool(self._queue),
        )
        self._enqueue(number, request, work, adds_gradient=adds_gradient)
        return future, True

    def _enqueue(
        self, number: int, request: AcceptedRequest, work: Work, *, adds_gradient: bool
    ) -> None:
        queued = _QueuedRequest(request=request, work=work, adds_gradient=adds_gradient)
        self._queue[number] = queued
        self._changed.set()

    # Turn after turn, in the stream's task

    async def _process_queue(self) -> None:
        """Complete the requests in their order until the model ends, then delete the model."""
        try:
            while self.ended is None:
                if await self._wait_for_next():
                    await self._complete_next()
        finally:
            # Also where the task is cancelled: nothing may wait for a stream that does no work.
            self.end("the service is closing")
            self.note_drop()
            if self.is_created:
                async with self._backend.lock_trainer(self.owner) as trainer:
                    await trainer.delete_model(self.model_id)

    async def _wait_for_next(self) -> bool:
        """Wait for the next request; return False at the end and after a gap."""
        try:
            async with asyncio.timeout(None) as gap:
                while self._next not in self._queue and self.ended is None:
                    # From here on the queued requests could run, but for the missing one.
                    if self._queue and gap.when() is None:
                        gap.reschedule(asyncio.get_running_loop().time() + self._gap_timeout_s)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._give_up_missing()
        return self._next in self._queue

    async def _complete_next(self) -> None:
        """Do the next request's work and store its answer (`Futures.complete`)."""
        seq_id, queued = self._next, self._queue.pop(self._next)
        # Before the work, so that a repetition of this request is known as one.
        self._next += 1

        async def work() -> Answer:
            if self._had_gap:
                await self._drop_incomplete_gradient()
            return await queued.work()

        await self._futures.complete(queued.request, work)
        result = queued.request.result
        if result is not None and result.error is not None:
            # The next step would be one of part of a batch (training.py refuses it).
            if queued.adds_gradient:
                self.failed.append(seq_id)
            if seq_id == 0:
                self.end(f"it could not be created: {result.error}")

    # Gaps, and the end

    def _give_up_missing(self) -> None:
        """Fail all queued requests, also those behind a second gap: they may be part of the same
        batch.
        """
        first, last = self._next, max(self._queue)
        missing = first
        while missing in self._queue:
            missing += 1
        self._next = last + 1
        self._had_gap = True
        self._fail_queued(
            f"seq_id {missing} of {self.model_id} did not come within {self._gap_timeout_s:g} s, "
            "so the requests after it failed and the accumulated gradient is dropped; later "
            "requests run again"
        )

    async def _drop_incomplete_gradient(self) -> None:
        # The gap has left part of a batch in the gradient.
        async with self._backend.lock_trainer(self.owner) as trainer:
            await trainer.drop_gradient(model_id=self.model_id)
        self.note_drop()
        self._had_gap = False

    def note_drop(self) -> None:
        """Note in the ledger, if there is one, that the accumulated gradient was dropped."""
        if self.ledger is not None:
            self.ledger.drop()

    def end(self, why: str) -> None:
        """Fail what is queued and what arrives later; what runs is finished. Idempotent."""
        if self.ended is None:
            self.ended = why
            self._fail_queued(self.gone)
            self._changed.set()

    def _fail_queued(self, error: str) -> None:
        for queued in self._queue.values():
            self._futures.fail(queued.request, error)
        self._queue.clear()
