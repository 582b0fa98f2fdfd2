"""Models in training, from their creation until the backend has deleted them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl.tinker.ids import MAX_SEQ_ID, owner_hash
from rl.tinker.parts import Parts
from rl.tinker.sessions import Session
from rl.tinker.storage import RunRecord
from rl.tinker.streams import Stream
from rl.tinker.types import (
    BaseModel,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    LoRASettings,
    Metadata,
    ModelSettings,
    NotFoundError,
)

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend


@dataclass(slots=True, eq=False)
class Model:
    model_id: str
    session: Session
    settings: ModelSettings
    base: BaseModel
    user_metadata: Metadata | None
    stream: Stream
    created_s: float
    """Unix time."""
    requested_s: float
    """Unix time of the last request."""
    is_created: bool = False
    """True once the backend has the model."""
    incomplete: set[int] = field(default_factory=set)
    """Seq ids of failed calls that should have added to the gradient of the next step."""
    end: str | None = None
    """Reason why the model accepts no more requests."""

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

    def record(self) -> RunRecord:
        return RunRecord(
            model_id=self.model_id,
            session_id=self.session.session_id,
            owner_hash=owner_hash(self.session.owner),
            settings=self.settings,
            created_s=self.created_s,
            user_metadata=self.user_metadata,
        )


class Models:
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
        self._models[model_id] = model = Model(
            model_id=model_id,
            session=session,
            settings=settings,
            base=base,
            user_metadata=user_metadata,
            stream=Stream(model_id, self._parts),
            created_s=now_s,
            requested_s=now_s,
        )
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
            await model.stream.idle()
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


def check_lora(lora: LoRASettings, base: BaseModel) -> None:
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
