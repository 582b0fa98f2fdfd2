"""The loop that steps one rank's engine, and the protocol that keeps tensor-parallel ranks in step.

With tensor parallelism each rank has its own engine, scheduler, cache and sampler in its own process. They
stay equal because rank 0 alone decides what is admitted, aborted and paused for: before each engine step it
broadcasts a `Turn`, and every rank does exactly what the turn says, in order. Each turn carries a digest of
the tokens that rank 0 drew in the step before; a rank that drew other tokens stops at once, instead of
producing logprobs of the wrong tokens. While nothing runs, rank 0 sends an empty turn from time to time. A
rank that hears nothing for longer than the deadline gives up; the connection to a dead rank closes at once.

`Driver.run` takes submitted requests, aborts and pauses, and produces finished samples. It waits for work
(unblocked by `submit`, `abort`, `pause`, `close`), for the engine's thread, and during a pause for the caller
that writes the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from actors.vllm.requests import (
    DivergedError,
    Drawn,
    EngineFailedError,
    EngineTimeoutError,
    GeneratorError,
    Request,
    Sample,
)
from rl.observability.spans import span
from rl.utils.threads import WorkerThread

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore

logger = logging.getLogger(__name__)

IDLE_TURNS_PER_TIMEOUT = 4


class SilentRankError(ConnectionError, TimeoutError):
    """A connected rank did not take part within the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A time between two steps in which every rank writes weights, or gives memory back or takes it again."""

    version: int | None = None
    """Policy version of the weights that are written; None to sleep or wake."""
    asleep: bool = False
    """True to sleep; running requests finish first."""

    def __str__(self) -> str:
        if self.version is not None:
            return f"the update of the weights to version {self.version}"
        return "sleep" if self.asleep else "wake"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
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

    def exchange(self, turn: Turn | None) -> Turn:
        """Return rank 0's next turn on every rank; rank 0 passes it.

        Raises:
            ConnectionError: a rank is gone, or was silent for `timeout_s`.
            RuntimeError: this rank drew other tokens than rank 0.
        """
        message: list[Any] = [turn, self._digest]
        if self._group is not None:
            with self._awaiting("rank 0's next turn"):
                dist.broadcast_object_list(message, src=0, group=self._group)
        decided, digest = message
        if digest != self._digest:
            raise RuntimeError(
                f"generator rank {self.rank} drew other tokens than rank 0 "
                f"(digest {self._digest:#x}, rank 0 has {digest:#x})"
            )
        assert isinstance(decided, Turn)
        return decided

    def record(self, drawn: Drawn) -> None:
        """Add a step's tokens to the digest that is compared at the next turn."""
        if self._group is not None:
            tokens = np.array([(request_id, token) for request_id, token, _ in drawn.tokens], dtype=np.int64)
            self._digest = zlib.crc32(tokens.tobytes(), self._digest)

    def all_agree(self, ok: bool) -> bool:
        """Return whether `ok` is true on all ranks; raise ConnectionError if a rank is gone or silent."""
        if self._group is None:
            return ok
        answer = torch.tensor(int(ok))
        with self._awaiting("the other ranks' result of a weight update"):
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())

    @contextmanager
    def _awaiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            kind = SilentRankError if "timed out" in str(error).lower() else ConnectionError
            raise kind(
                f"generator rank {self.rank} awaited {what}, at most {self.timeout_s:g} s: {error}"
            ) from error


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(kw_only=True, slots=True, eq=False)
class _Wanted:
    """A requested pause, and the three moments of its progress."""

    pause: Pause
    begun: asyncio.Future[bool] = field(default_factory=_future)
    """No step is running: the caller may change the engine."""
    changed: asyncio.Future[bool] = field(default_factory=_future)
    """The caller is done; True if it succeeded."""
    ended: asyncio.Future[bool] = field(default_factory=_future)
    """All ranks are done; True if all succeeded."""


class Driver:
    """The engine loop of one rank. Only `_take` and `_settle` run in the engine's thread."""

    def __init__(self, *, core: VLLMCore, lockstep: Lockstep, thread: WorkerThread, drains: bool) -> None:
        """`drains` makes an update wait until running requests have finished."""
        self.policy_version: int | None = None
        """Version of the weights in use; None while there are none."""
        self._core = core
        self._lockstep = lockstep
        self._thread = thread
        self._drains = drains
        self._wake = asyncio.Event()
        self._waiting: list[Request] = []
        self._aborted: list[int] = []
        self._samples: dict[int, Sample] = {}
        """Samples that have not ended, by request id."""
        self._wanted: list[_Wanted] = []
        self._closing = False
        self._failure: GeneratorError | None = None

    def check_serving(self) -> None:
        """Raise GeneratorError if the engine has failed or was closed."""
        if self._failure is not None:
            raise self._failure

    def check_weights(self) -> None:
        """Raise GeneratorError if there are no weights and no update is waiting."""
        if self._core.asleep:
            raise GeneratorError("the generator sleeps: wake must be called, and a version pulled, first")
        if self.policy_version is None and all(w.pause.version is None for w in self._wanted):
            raise GeneratorError("the generator has no weights: a version must be pulled first")

    def submit(self, samples: Sequence[Sample]) -> None:
        self._samples |= {sample.request.id: sample for sample in samples}
        self._waiting += [sample.request for sample in samples]
        self._wake.set()

    def withdraw(self, samples: Sequence[Sample]) -> None:
        """End what is left of these samples, whose call was cancelled or has failed."""
        self._drop({sample.request.id for sample in samples} & self._samples.keys())

    def abort(self, call_ids: Collection[str] | None) -> int:
        """End the completions of these calls (None: all calls) as they are; return their number."""
        ids = {
            request_id
            for request_id, sample in self._samples.items()
            if sample.call_id is not None and (call_ids is None or sample.call_id in call_ids)
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
    async def pause(self, pause: Pause) -> AsyncIterator[None]:
        """Hold all ranks between two steps, while the body changes this rank's engine.

        Raises:
            GeneratorError: another rank failed, the engine has failed, or weights come while it sleeps.
        """
        self.check_serving()
        if pause.version is not None and self._core.asleep:
            raise GeneratorError(
                f"the generator sleeps: wake must be called before version {pause.version} is taken"
            )
        wanted = _Wanted(pause=pause)
        self._wanted.append(wanted)
        self._wake.set()
        with span("waits for a turn", version=pause.version):
            await wanted.begun
        changed = False
        try:
            yield
            changed = True
        finally:
            if not wanted.changed.done():
                wanted.changed.set_result(changed)
        if not await wanted.ended:
            raise GeneratorError(f"{pause} failed on another rank of the generator")

    async def rest(self, *, asleep: bool) -> None:
        """Sleep as soon as nothing runs, or wake; waiting requests fail."""
        self.check_serving()
        if self._core.asleep != asleep:
            async with self.pause(Pause(asleep=asleep)):
                await self._thread.run(self._core.rest, asleep)

    def close(self) -> None:
        """Let `run` return. On ranks other than 0 it returns after rank 0's."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Step the engine until it is closed or fails; then every waiting caller gets the reason."""
        try:
            while not self._closing or self._lockstep.rank != 0:
                turn, drawn = await self._thread.run(self._take, await self._decide())
                if drawn is not None:
                    self._deliver(drawn)
                if turn.pause is not None:
                    await self._hold(turn.pause)
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

    async def _decide(self) -> Turn | None:
        """Wait until there is something to do and return the turn; None on ranks other than 0."""
        if self._lockstep.rank != 0:
            return None
        while not self._closing:
            self._wake.clear()
            self._wanted = [wanted for wanted in self._wanted if not wanted.begun.cancelled()]
            aborted, self._aborted = tuple(self._aborted), []
            if self._wanted:
                # Weights come first: they cannot be written once the engine sleeps.
                pause = min((w.pause for w in self._wanted), key=lambda pause: pause.version is None)
                if self._core.has_requests and (self._drains or pause.version is None):
                    return Turn(abort=aborted, step=True)
                return Turn(abort=aborted, pause=pause)
            admitted, self._waiting = tuple(self._waiting), []
            if admitted or aborted or self._core.has_requests:
                return Turn(admit=admitted, abort=aborted, step=True)
            try:
                async with asyncio.timeout(self._lockstep.idle_turn_s):
                    await self._wake.wait()
            except TimeoutError:
                return Turn()  # tells the other ranks that this rank lives
        return Turn(stop=True)

    def _take(self, decided: Turn | None) -> tuple[Turn, Drawn | None]:
        """Do what rank 0 decided; None means that the decision comes from another process."""
        turn = self._lockstep.exchange(decided)
        for request in turn.admit:
            self._core.add(request)
        self._core.abort(turn.abort)
        if not turn.step:
            return turn, None
        drawn = self._core.step()
        self._lockstep.record(drawn)
        return turn, drawn

    def _deliver(self, drawn: Drawn) -> None:
        """Give the tokens to their samples, and drop requests that end themselves or have failed."""
        samples, version = self._samples, self.policy_version
        assert version is not None
        unwanted = drawn.diverged & samples.keys()
        for request_id in unwanted:
            samples[request_id].fail(
                DivergedError("the model's logprobs are NaN: weights or activations are not finite")
            )
        for request_id, token_id, logprob in drawn.tokens:
            if (sample := samples.get(request_id)) is not None:
                sample.add(token_id, logprob, version)
                if sample.has_ended:
                    sample.finish("stop")
                    unwanted.add(request_id)
        for request_id, logprobs in drawn.prompt_logprobs.items():
            if (sample := samples.get(request_id)) is not None:
                sample.prompt_logprobs = logprobs
        for request_id, reason in drawn.finished.items():
            if (sample := samples.pop(request_id, None)) is not None:
                sample.finish(reason)
        if unwanted := unwanted & samples.keys():
            self._drop(unwanted)

    async def _hold(self, pause: Pause) -> None:
        """Let the caller change the engine, and agree with all ranks that it is changed."""
        wanted = await self._caller_of(pause)
        # The request stays in the list until it is over, so that a failure reaches its caller; until then the
        # weights belong to no version.
        self.policy_version, changed = None, False
        if not wanted.begun.cancelled():
            wanted.begun.set_result(True)
            changed = await wanted.changed
        everywhere = await self._thread.run(self._settle, pause, changed)
        if not everywhere:
            self._fail_samples(GeneratorError(f"{pause} failed"))
        elif pause.version is None:
            self._fail_samples(GeneratorError("the generator went to sleep"))
        else:
            self.policy_version = pause.version
        self._wanted.remove(wanted)
        if not wanted.ended.done():
            wanted.ended.set_result(everywhere)

    def _settle(self, pause: Pause, changed: bool) -> bool:
        """Return whether all ranks succeeded, and prepare the engine for the next step."""
        everywhere = self._lockstep.all_agree(changed)
        if not everywhere:
            self._core.abort_all()
        if pause.version is not None:
            self._core.weights_changed()
        return everywhere

    async def _caller_of(self, pause: Pause) -> _Wanted:
        """Return this rank's request for the pause that rank 0 decided on; wait until it has come."""
        timeout_s = self._lockstep.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._wake.clear()
                    for wanted in self._wanted:
                        if wanted.pause == pause:
                            return wanted
                    await self._wake.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {self._lockstep.rank}: rank 0 begins {pause}, but this rank was not asked for it "
                f"within {timeout_s:g} s"
            ) from error

    def _fail(self, failure: GeneratorError) -> None:
        self._failure = failure
        self._fail_samples(failure)
        for wanted in self._wanted:
            future = wanted.ended if wanted.begun.done() else wanted.begun
            if not future.done():
                future.set_exception(failure)
        self._wanted = []

    def _fail_samples(self, failure: GeneratorError) -> None:
        """Fail every request, running or waiting."""
        for sample in self._samples.values():
            sample.fail(failure)
        self._samples = {}
        self._waiting = []
