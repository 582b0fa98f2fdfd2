"""Models in training, and the stream that orders each one's requests.

Requests arrive in any order: the first chunk of a batch often last, some twice, some never. Each one begins when
the one before it has ended, well or badly. Later requests wait for a missing seq id at most `gap_timeout_s`, from
the moment they could run. Then the missing ones count as lost, and the waiting ones fail: an `optim_step` among
them would step with part of a batch. The accumulated gradient is part of such a batch and is dropped. The stream
goes on after the last waiting seq id; a missing request that arrives later is never done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tinker import types as wire

from rl.tinker.futures import Parts, Request, Result
from rl.tinker.sessions import Session
from rl.tinker.storage import RunRecord
from rl.tinker.types import (
    MAX_SEQ_ID,
    BaseModel,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    Metadata,
    ModelSettings,
    NotFoundError,
)

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend

Work: TypeAlias = Callable[[], Awaitable[Result]]


class Stream:
    """One model's requests, in the order of their seq ids, done by a task that runs until `end`."""

    def __init__(self, model_id: str, parts: Parts) -> None:
        self._model_id = model_id
        self._backend = parts.backend
        self._futures = parts.futures
        self._gap_timeout_s = parts.limits.gap_timeout_s
        self._next = 0
        self._held: dict[int, tuple[Request, Work]] = {}
        self._had_gap = False
        self._changed = asyncio.Event()
        self._ended: str | None = None
        self._task = parts.background.start(self._run(), f"work of {model_id}")

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
        """Accept a seq id that has not come before. A request that has failed only uses up its seq id, so that
        later ones do not wait for it."""
        if self._ended is not None:
            self._futures.fail([request], self._ended)
        elif seq_id >= self._next:
            self._held[seq_id] = request, work
            self._changed.set()

    def end(self, error: str) -> None:
        """Fail what waits and what arrives later; what runs is finished."""
        if self._ended is None:
            self._ended = error
            self._fail_held(error)
            self._changed.set()

    async def finished(self) -> None:
        """Wait for what still runs after `end`."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._ended is None:
                if await self._is_next_here():
                    request, work = self._held.pop(self._next)
                    self._next += 1
                    if request.result is None:
                        await self._futures.run(request, partial(self._do, work))
        finally:
            self.end("the service is closing")

    async def _is_next_here(self) -> bool:
        """Wait for the next request; return False at the end of the stream and after a gap."""
        try:
            async with asyncio.timeout(None) as gap:
                while self._next not in self._held and self._ended is None:
                    if self._held and gap.when() is None:
                        gap.reschedule(asyncio.get_running_loop().time() + self._gap_timeout_s)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._give_up()
        return self._next in self._held

    async def _do(self, work: Work) -> Result:
        if self._had_gap:
            await self._backend.drop_gradient(self._model_id)
            self._had_gap = False
        return await work()

    def _give_up(self) -> None:
        first, last = self._next, max(self._held)
        missing = next(seq_id for seq_id in range(first, last) if seq_id not in self._held)
        self._next = last + 1
        self._had_gap = True
        self._fail_held(
            f"seq_id {missing} of {self._model_id} did not come within {self._gap_timeout_s:g} s, so the requests "
            "after it failed and the accumulated gradient is dropped; later requests run again"
        )

    def _fail_held(self, error: str) -> None:
        self._futures.fail([request for request, _ in self._held.values()], error)
        self._held.clear()


@dataclass(slots=True, eq=False)
class Model:
    """A model in training, from its creation until the backend has deleted it."""

    record: RunRecord
    session: Session
    base: BaseModel
    stream: Stream
    requested_s: float
    """Unix time of the last request."""
    is_created: bool = False
    """True once the backend has the model."""
    incomplete: set[int] = field(default_factory=set)
    """Seq ids of failed calls that should have added to the gradient of the next step."""
    end: str | None = None
    """Reason why the model accepts no more requests."""

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def settings(self) -> ModelSettings:
        return self.record.settings

    @contextmanager
    def adding(self, seq_id: int, *, backward: bool) -> Iterator[None]:
        """Remember the seq id if the block, which should add to the gradient, fails."""
        try:
            yield
        except BaseException:
            if backward:
                self.incomplete.add(seq_id)
            raise

    def take_incomplete(self, before: int) -> list[int]:
        """Return the failed calls before a seq id, and forget them."""
        failed = sorted(seq_id for seq_id in self.incomplete if seq_id < before)
        self.incomplete -= set(failed)
        return failed


class Models:
    """Models of all owners by id."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._models: dict[str, Model] = {}
        self._ended: dict[str, str] = {}
        """Reasons why models of live sessions are gone."""
        parts.sessions.on_end.append(self._end_session)

    def check_room(self, owner: str) -> None:
        """Raise LimitReachedError if the owner has `limits.models` already."""
        most = self._parts.limits.models
        if len(self.of_owner(owner)) >= most:
            raise LimitReachedError(f"limit models: {most} are in memory; unload one or finish its session")

    def add(
        self,
        model_id: str,
        settings: ModelSettings,
        *,
        base: BaseModel,
        session: Session,
        user_metadata: Metadata | None,
    ) -> Model:
        now_s = self._parts.wall_time_s()
        record = RunRecord(
            model_id=model_id,
            session_id=session.session_id,
            owner_hash=session.owner,
            settings=settings,
            created_s=now_s,
            user_metadata=user_metadata,
        )
        self._models[model_id] = model = Model(record, session, base, Stream(model_id, self._parts), now_s)
        session.model_ids.append(model_id)
        return model

    def was_added(self, model_id: str) -> bool:
        return model_id in self._models or model_id in self._ended

    def live(self, model_id: str, owner: str) -> Model:
        """Return a model that accepts requests, and keep its session alive.

        Raises:
            NotFoundError: there is no such model.
            GoneError: the model has ended.
        """
        self._parts.sessions.live(model_id, owner)
        model = self._models.get(model_id)
        if (why := self._ended.get(model_id) if model is None else model.end) is not None:
            raise GoneError(f"model {model_id} is no longer there: {why}")
        if model is None:
            raise NotFoundError(f"there is no model {model_id!r:.100}")
        model.requested_s = self._parts.wall_time_s()
        return model

    def of_owner(self, owner: str) -> list[Model]:
        """Return an owner's models in memory, oldest first."""
        return [model for model in self._models.values() if model.session.owner == owner]

    def find(self, model_id: str, owner: str) -> Model | None:
        model = self._models.get(model_id)
        return model if model is not None and model.session.owner == owner else None

    async def end(self, model: Model, why: str, *, when_idle: bool = True) -> None:
        """Fail what waits, finish what runs unless told otherwise, and free the memory."""
        if model.end is None:
            self._stop(model, why)
            await self._delete(model, when_idle=when_idle)

    def _stop(self, model: Model, why: str) -> None:
        model.end = why
        model.stream.end(f"model {model.model_id} is no longer there: {why}")

    async def _delete(self, model: Model, *, when_idle: bool) -> None:
        if when_idle:
            await model.stream.finished()
        try:
            if model.is_created:
                await self._parts.backend.delete_model(model.model_id)
        finally:
            del self._models[model.model_id]
            if self._parts.sessions.is_live(model.session):
                assert model.end is not None
                self._ended[model.model_id] = model.end

    def _end_session(self, session: Session, why: str) -> None:
        for model_id in session.model_ids:
            self._ended.pop(model_id, None)
            if (model := self._models.get(model_id)) is not None and model.end is None:
                self._stop(model, why)
                self._parts.background.start(self._delete(model, when_idle=True), f"end of {model_id}")


def find_base(backend: TinkerBackend, name: str | None) -> BaseModel:
    for base in backend.base_models:
        if base.name == name:
            return base
    offered = ", ".join(repr(base.name) for base in backend.base_models)
    raise InvalidRequestError(f"base_model={name!r:.100}: must be one of {offered or 'none'}")


def check_lora(lora: wire.LoraConfig, base: BaseModel) -> None:
    """Raise InvalidRequestError for adapters that cannot be created."""
    if not 1 <= lora.rank <= base.max_lora_rank:
        raise InvalidRequestError(
            f"lora_config.rank={lora.rank}: must be 1 to {base.max_lora_rank}, or 0 to train all parameters"
        )
    if lora.seed is not None and not 0 <= lora.seed <= MAX_SEQ_ID:
        raise InvalidRequestError(f"lora_config.seed={lora.seed}: must be 0 to {MAX_SEQ_ID}, or none")
    if not (lora.train_attn or lora.train_mlp or (lora.train_unembed and not base.tie_embeddings)):
        raise InvalidRequestError(
            f"lora_config: train_attn=False, train_mlp=False, train_unembed={lora.train_unembed}: nothing would "
            "have an adapter; a head that is tied to the embedding never has one"
        )
