"""From a checked call to a place in a model's stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rl.tinker.backend import Backend
from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.messages import ModelSettings
from rl.tinker.service.background import Background
from rl.tinker.service.checks import check_seq_id, find_base
from rl.tinker.service.futures import Futures
from rl.tinker.service.limits import Limits
from rl.tinker.service.models import Model, Models
from rl.tinker.service.responses import Metadata, Response, Submitted, UnloadedModel
from rl.tinker.service.sessions import Sessions, check_metadata
from rl.tinker.service.streams import Work


class Submission:
    """What is submitted twice is found before anything is checked."""

    def __init__(
        self,
        *,
        backend: Backend,
        sessions: Sessions,
        models: Models,
        futures: Futures,
        background: Background,
        limits: Limits,
    ) -> None:
        self._backend = backend
        self._sessions = sessions
        self._models = models
        self._futures = futures
        self._background = background
        self._limits = limits

    def create(
        self,
        session_id: str,
        model_seq_id: int,
        settings: Callable[[], ModelSettings],
        work: Callable[[Model], Awaitable[Response]],
        *,
        user_metadata: Metadata | None,
        owner: str,
    ) -> Submitted:
        session = self._sessions.live(session_id, owner)
        check_seq_id("model_seq_id", model_seq_id, first=0)
        model_id = f"{session.session_id}:train:{model_seq_id}"
        submitted = Submitted(request_id=f"{model_id}:0", model_id=model_id)
        if self._models.was_added(model_id):
            return submitted
        check_metadata(user_metadata, max_bytes=self._limits.metadata_bytes)
        checked = settings()
        if not find_base(self._backend, checked.base_model).trainable:
            raise InvalidRequestError(f"base_model is {checked.base_model!r}, which cannot be trained")
        self._backend.check_settings(checked)
        self._models.check_room(owner)
        request = self._futures.begin(submitted.request_id, owner=owner, model_id=model_id)
        model = self._models.add(model_id, checked, session=session, user_metadata=user_metadata)
        model.stream.submit(0, request, lambda: work(model))
        return submitted

    def submit(
        self, model_id: str, seq_id: int, work: Callable[[Model], Work], *, owner: str, num_bytes: int = 0
    ) -> Submitted:
        """`work` checks the request and says what to do in its turn."""
        self._sessions.live(model_id, owner)
        check_seq_id("seq_id", seq_id, first=1)
        submitted = Submitted(request_id=f"{model_id}:{seq_id}", model_id=model_id)
        if submitted.request_id in self._futures:
            return submitted
        model = self._models.live(model_id, owner)
        if model.stream.has_passed(seq_id):
            return submitted
        try:
            checked = work(model)
        except (InvalidRequestError, NotFoundError) as error:
            request = self._futures.begin(submitted.request_id, owner=owner, model_id=model_id, unblocks=True)
            model.stream.refuse(seq_id, request, str(error))
            raise
        request = self._futures.begin(
            submitted.request_id,
            owner=owner,
            model_id=model_id,
            num_bytes=num_bytes,
            unblocks=model.stream.unblocks(seq_id),
        )
        model.stream.submit(seq_id, request, checked)
        return submitted

    def unload(self, model_id: str, *, owner: str) -> Submitted:
        submitted = Submitted(request_id=f"{model_id}:unload", model_id=model_id)
        self._sessions.live(model_id, owner)
        if submitted.request_id in self._futures:
            return submitted
        model = self._models.live(model_id, owner)
        request = self._futures.begin(submitted.request_id, owner=owner, model_id=model_id, unblocks=True)

        async def unloaded() -> UnloadedModel:
            await self._models.end(model, "it was unloaded")
            return UnloadedModel(model_id=model_id)

        async def run() -> None:
            await self._futures.run(request, unloaded)

        self._background.start(run(), f"end of {model_id}")
        return submitted
