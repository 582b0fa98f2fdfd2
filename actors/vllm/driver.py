"""The loop that steps one rank's engine.

`Driver.run` consumes submitted requests, aborts and weight updates, and produces finished
samples. It waits for work (unblocked by `submit`, `abort`, `update`, `close`), for the engine's
thread, and during an update for the caller who writes the weights. On rank 0 it decides what
happens next; on other ranks it waits for rank 0's decision instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.vllm.delivery import Samples, deliver
from actors.vllm.errors import EngineFailedError, EngineTimeoutError, GeneratorError
from actors.vllm.lockstep import Drawn, Lockstep, Request, Turn
from actors.vllm.requests import Sample, Scored
from rl.observability.activity import doing
from rl.worker_thread import WorkerThread

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore
    from actors.vllm.engine_config import OnUpdate

logger = logging.getLogger(__name__)

IDLE = "nothing to do: an empty turn tells the other ranks that this one lives"


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(kw_only=True, slots=True, eq=False)
class _Update:
    """A wish to write the weights, and the three moments of its way."""

    version: int
    turn: asyncio.Future[bool] = field(default_factory=_future)
    """No step is being made: the caller may write."""
    written: asyncio.Future[bool] = field(default_factory=_future)
    """The caller is done; whether it went well."""
    finished: asyncio.Future[bool] = field(default_factory=_future)
    """All ranks are done; whether it went well on all."""


class Driver:
    """Of one rank. Everything but `_take` and `_settle` runs on the event loop."""

    def __init__(
        self, *, core: VLLMCore, lockstep: Lockstep, thread: WorkerThread, on_update: OnUpdate
    ) -> None:
        self.policy_version: int | None = None
        """Of the weights in use; None while there are none."""
        self._core = core
        self._lockstep = lockstep
        self._thread = thread
        self._drains = on_update == "drain"
        self._wake = asyncio.Event()
        self._waiting: list[Request] = []
        self._aborted: list[int] = []
        self._samples: Samples = {}
        self._updates: list[_Update] = []
        self._rests: list[tuple[bool, asyncio.Future[bool]]] = []
        self._closing = False
        self._failure: GeneratorError | None = None

    def check_serving(self) -> None:
        """Raises GeneratorError if the engine has failed or was closed."""
        if self._failure is not None:
            raise self._failure

    def check_weights(self) -> None:
        """Raises GeneratorError if there are no weights, and none on their way."""
        if self._core.asleep:
            raise GeneratorError("the generator sleeps: wake must be called, and a version pulled, first")
        if self.policy_version is None and not self._updates:
            raise GeneratorError("the generator has no weights: a version must be pulled first")

    def submit(self, requests: Sequence[Request], samples: Sequence[Sample | Scored]) -> None:
        for request, sample in zip(requests, samples, strict=True):
            self._samples[request.id] = sample
        self._waiting += requests
        self._wake.set()

    def withdraw(self, requests: Sequence[Request]) -> None:
        """End what is left of these requests; nobody waits for them."""
        self._drop({request.id for request in requests if request.id in self._samples})

    def abort(self, call_ids: Collection[str] | None) -> int:
        """End the completions of these calls as they are, of all calls when None; returns how many."""
        ids = {
            request_id
            for request_id, sample in self._samples.items()
            if sample.call.call_id is not None and (call_ids is None or sample.call.call_id in call_ids)
        }
        for request_id in ids:
            self._samples[request_id].finish("abort")
        self._drop(ids)
        return len(ids)

    def _drop(self, ids: set[int]) -> None:
        for request_id in ids:
            del self._samples[request_id]
        self._aborted += sorted(ids - {request.id for request in self._waiting})
        self._waiting = [request for request in self._waiting if request.id not in ids]
        self._wake.set()

    @asynccontextmanager
    async def update(self, version: int) -> AsyncIterator[None]:
        """Within it no rank makes a step and the weights may be written; `version` is theirs.

        Raises:
            GeneratorError: another rank failed to write, the engine has failed, or it sleeps.
        """
        if self._core.asleep:
            raise GeneratorError(
                f"the generator sleeps: wake must be called before version {version} is taken"
            )
        update = _Update(version=version)
        self._updates.append(update)
        self._wake.set()
        with doing("waits for a turn", version=version):
            await update.turn
        written = False
        try:
            yield
            written = True
        finally:
            if not update.written.done():
                update.written.set_result(written)
        if not await update.finished:
            raise GeneratorError(f"version {version} was not written on every rank of the generator")

    async def rest(self, *, asleep: bool) -> None:
        """Sleep as soon as nothing runs, or wake; returns when this rank does. What waits then fails."""
        self.check_serving()
        if self._core.asleep != asleep:
            self._rests.append((asleep, _future()))
            self._wake.set()
            await self._rests[-1][1]

    def close(self) -> None:
        """Let `run` return. On ranks other than 0 it does when rank 0's has."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Until closed, or until something fails; then everybody who waits hears why."""
        try:
            while not self._closing or self._lockstep.rank != 0:
                turn, drawn = await self._thread.run(self._take, await self._decide())
                if drawn is not None:
                    self._deliver(drawn)
                if turn.update is not None:
                    await self._update(turn.update)
                if turn.asleep is not None:
                    self._rested(turn.asleep)
                if turn.stop:
                    break
            self._fail(GeneratorError("the generator was closed"))
        except Exception as error:
            logger.exception("the generator's engine failed")
            kind = EngineTimeoutError if isinstance(error, TimeoutError) else EngineFailedError
            failure = kind(
                f"the engine of generator rank {self._lockstep.rank} failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(failure)
            # Leaving the process groups tells the other ranks, which would wait for this one.
            with contextlib.suppress(Exception):
                await self._thread.run(self._core.close)

    def _take(self, decided: Turn | None) -> tuple[Turn, Drawn | None]:
        """In the engine's thread: do what rank 0 decided, here or elsewhere."""
        if decided is None:
            turn = self._lockstep.receive()
        else:
            turn = decided
            self._lockstep.send(turn)
        for request in turn.admit:
            self._core.add(request)
        self._core.abort(turn.abort)
        if turn.asleep is not None:
            self._core.rest(asleep=turn.asleep)
        if not turn.step:
            return turn, None
        drawn = self._core.step()
        self._lockstep.record(drawn)
        return turn, drawn

    async def _decide(self) -> Turn | None:
        """The next turn, as soon as there is something to do; None where rank 0 decides."""
        if self._lockstep.rank != 0:
            return None
        while not self._closing:
            self._wake.clear()
            self._updates = [u for u in self._updates if not u.turn.cancelled()]
            aborted, self._aborted = tuple(self._aborted), []
            if self._updates or self._rests:
                if self._core.has_requests and (self._drains or not self._updates):
                    return Turn(abort=aborted, step=True)
                if self._updates:
                    return Turn(abort=aborted, update=self._updates[0].version)
                return Turn(abort=aborted, asleep=self._rests[0][0])
            admitted, self._waiting = tuple(self._waiting), []
            if admitted or aborted or self._core.has_requests:
                return Turn(admit=admitted, abort=aborted, step=True)
            try:
                await asyncio.wait_for(self._wake.wait(), self._lockstep.idle_turn_s)
            except TimeoutError:
                logger.debug(IDLE)
                return Turn()
        return Turn(stop=True)

    def _deliver(self, drawn: Drawn) -> None:
        assert self.policy_version is not None
        unwanted = deliver(drawn, self._samples, policy_version=self.policy_version)
        if unwanted:
            self._drop(unwanted)

    def _rested(self, asleep: bool) -> None:
        self.policy_version = None
        self._fail_samples(GeneratorError("the generator went to sleep"))
        for wish, done in self._rests:
            if wish == asleep and not done.done():
                done.set_result(True)
        self._rests = [(wish, done) for wish, done in self._rests if not done.done()]

    async def _update(self, version: int) -> None:
        update = await self._update_of(version)
        # It stays in the list until it is over, so that a failure reaches its caller.
        written = False
        if not update.turn.cancelled():
            update.turn.set_result(True)
            # Of no version while they are being written.
            self.policy_version = None
            written = await update.written
        everywhere = await self._thread.run(self._settle, written)
        if everywhere:
            self.policy_version = version
        else:
            self._fail_samples(GeneratorError(f"the update of the weights to version {version} failed"))
        self._updates.remove(update)
        if not update.finished.done():
            update.finished.set_result(everywhere)

    def _settle(self, written: bool) -> bool:
        """In the engine's thread: whether the update went well on all ranks."""
        everywhere = self._lockstep.all_agree(written)
        if not everywhere:
            self._core.abort_all()
        self._core.weights_changed()
        return everywhere

    async def _update_of(self, version: int) -> _Update:
        """The caller's wish that rank 0 has decided on; elsewhere it may not have come yet."""
        timeout_s = self._lockstep.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._wake.clear()
                    for update in self._updates:
                        if update.version == version:
                            return update
                    await self._wake.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {self._lockstep.rank}: rank 0 updates to version {version}, but nobody asked "
                f"this rank to within {timeout_s:g} s"
            ) from error

    def _fail(self, failure: GeneratorError) -> None:
        self._failure = failure
        self._fail_samples(failure)
        awaited = [u.finished if u.turn.done() else u.turn for u in self._updates]
        for future in awaited + [done for _, done in self._rests]:
            if not future.done():
                future.set_exception(failure)
        self._updates, self._rests = [], []

    def _fail_samples(self, failure: GeneratorError) -> None:
        """Every sample that is not finished, running or waiting."""
        for call in {id(sample.call): sample.call for sample in self._samples.values()}.values():
            call.fail(failure)
        self._samples = {}
        self._waiting = []
