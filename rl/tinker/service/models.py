"""Models in training, from their creation until the backend has deleted them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl.tinker.backend import Backend
from rl.tinker.errors import GoneError, LimitReachedError, NotFoundError
from rl.tinker.messages import ModelSettings
from rl.tinker.service.background import Background, in_thread
from rl.tinker.service.futures import Futures
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Metadata
from rl.tinker.service.sessions import Session, Sessions
from rl.tinker.service.storage import Storage
from rl.tinker.service.streams import Stream


@dataclass(slots=True, eq=False)
class Model:
    model_id: str
    session: Session
    settings: ModelSettings
    user_metadata: Metadata | None
    stream: Stream
    created_s: float
    """Wall time."""
    requested_s: float
    """Wall time of the last request."""
    is_created: bool = False
    """The backend has it."""
    has_saved: bool = False
    """Or tried to."""
    incomplete: set[int] = field(default_factory=set)
    """Seq ids of what failed to add to the gradient of the next step."""
    end: str | None = None
    """Why it takes no requests any more."""

    @contextmanager
    def adding(self, seq_id: int, *, backward: bool) -> Iterator[None]:
        """Remember if what was to add to the gradient fails."""
        done = False
        try:
            yield
            done = True
        finally:
            if backward and not done:
                self.incomplete.add(seq_id)

    def take_incomplete(self, before: int) -> list[int]:
        """What failed before this seq id, and forget it."""
        failed = sorted(seq_id for seq_id in self.incomplete if seq_id < before)
        self.incomplete -= set(failed)
        return failed


class Models:
    def __init__(
        self,
        *,
        backend: Backend,
        storage: Storage,
        sessions: Sessions,
        futures: Futures,
        background: Background,
        limits: Limits,
        wall_time_s: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._sessions = sessions
        self._futures = futures
        self._background = background
        self._limits = limits
        self._wall_time_s = wall_time_s
        self._models: dict[str, Model] = {}
        self._ended: dict[str, str] = {}
        """Why models of sessions that have not ended are no longer there."""
        sessions.on_end.append(self._end_session)

    def check_room(self, owner: str) -> None:
        """
        Raises:
            LimitReachedError: `limits.models`.
        """
        if len(self.of_owner(owner)) >= self._limits.models:
            raise LimitReachedError(
                f"limit models: {self._limits.models} are in memory; unload one or finish its session"
            )

    def add(
        self, model_id: str, settings: ModelSettings, *, session: Session, user_metadata: Metadata | None
    ) -> Model:
        now_s = self._wall_time_s()
        model = Model(
            model_id=model_id,
            session=session,
            settings=settings,
            user_metadata=user_metadata,
            stream=Stream(
                model_id,
                futures=self._futures,
                background=self._background,
                gap_timeout_s=self._limits.gap_timeout_s,
                after_gap=lambda: self._backend.drop_gradient(model_id),
            ),
            created_s=now_s,
            requested_s=now_s,
        )
        self._models[model_id] = model
        session.model_ids.append(model_id)
        return model

    def was_added(self, model_id: str) -> bool:
        return model_id in self._models or model_id in self._ended

    def live(self, model_id: str, owner: str) -> Model:
        """
        Raises:
            NotFoundError, GoneError: as there is no such model, or no longer.
        """
        self._sessions.live(model_id, owner)
        model = self._models.get(model_id)
        if (why := self._ended.get(model_id) if model is None else model.end) is not None:
            raise GoneError(f"model {model_id} is no longer there: {why}")
        if model is None:
            raise NotFoundError(f"there is no model {model_id}")
        model.requested_s = self._wall_time_s()
        return model

    def of_owner(self, owner: str) -> list[Model]:
        """Those that hold memory, the oldest first."""
        return [model for model in self._models.values() if model.session.owner == owner]

    def find(self, model_id: str, owner: str) -> Model | None:
        model = self._models.get(model_id)
        return model if model is not None and model.session.owner == owner else None

    async def end(self, model: Model, why: str) -> None:
        """What waits fails, what runs is finished, then the memory is free. Only the first call counts."""
        if model.end is None:
            self._stop(model, why)
            await self._delete_when_idle(model)

    async def end_uncreated(self, model: Model, why: str) -> None:
        """As `end`, from the model's own work when it could not be created."""
        self._stop(model, why)
        await self._delete(model)

    async def _delete_when_idle(self, model: Model) -> None:
        await model.stream.idle()
        if model.model_id in self._models:
            await self._delete(model)

    def _stop(self, model: Model, why: str) -> None:
        model.end = model.end or why
        model.stream.end(f"model {model.model_id} is no longer there: {why}")

    async def _delete(self, model: Model) -> None:
        try:
            if model.is_created:
                await self._backend.delete_model(model.model_id)
            if model.has_saved:
                await in_thread(self._storage.remove_empty_run, model.model_id)
        finally:
            del self._models[model.model_id]
            if self._sessions.is_live(model.session):
                assert model.end is not None
                self._ended[model.model_id] = model.end
            else:
                self._futures.forget_session(model.session.session_id, model.session.owner)

    def _end_session(self, session: Session, why: str) -> None:
        for model_id in session.model_ids:
            self._ended.pop(model_id, None)
            if (model := self._models.get(model_id)) is not None and model.end is None:
                self._stop(model, why)
                self._background.start(self._delete_when_idle(model), f"end of {model_id}")
