"""What is done for a model's requests when their turn comes: backend, storage and samplers together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.tinker.backend import Backend
from rl.tinker.errors import GoneError, InvalidRequestError, TinkerError
from rl.tinker.messages import AdamParams, Datum, ForwardBackwardOutput, LossCall, OptimStepOutput
from rl.tinker.service.models import Model, Models
from rl.tinker.service.names import CheckpointPath, owner_hash
from rl.tinker.service.responses import (
    CheckpointKind,
    CreatedModel,
    LoadedState,
    Metadata,
    SavedSampler,
    SavedState,
)
from rl.tinker.service.run_files import RunRecord
from rl.tinker.service.samplers import Samplers
from rl.tinker.service.sampling import SamplingSessions, Snapshot
from rl.tinker.service.sessions import Sessions
from rl.tinker.service.storage import Storage, Stored


class ModelWork:
    def __init__(
        self,
        *,
        backend: Backend,
        storage: Storage,
        sessions: Sessions,
        models: Models,
        samplers: Samplers,
        sampling: SamplingSessions,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._sessions = sessions
        self._models = models
        self._samplers = samplers
        self._sampling = sampling

    async def create(self, model: Model) -> CreatedModel:
        await self._create(model, None, optimizer=False)
        return CreatedModel(model_id=model.model_id)

    async def create_from_state(self, model: Model, stored: Stored, *, optimizer: bool) -> LoadedState:
        await self._create(model, stored, optimizer=optimizer)
        return LoadedState(path=str(stored.path), model_id=model.model_id)

    async def _create(self, model: Model, stored: Stored | None, *, optimizer: bool) -> None:
        try:
            await self._backend.create_model(model.model_id, model.settings)
            model.is_created = True
            if stored is not None:
                await self.load(model, stored, optimizer=optimizer)
        except BaseException as error:
            reason = str(error) if isinstance(error, TinkerError) else "the server failed"
            await self._models.end_uncreated(model, f"it could not be created: {reason}")
            raise

    async def forward_backward(
        self, model: Model, seq_id: int, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        with model.adding(seq_id, backward=backward):
            return await self._backend.forward_backward(model.model_id, data, loss, backward=backward)

    async def optim_step(self, model: Model, seq_id: int, params: AdamParams) -> OptimStepOutput:
        """
        Raises:
            InvalidRequestError: part of the batch is missing, because a `forward_backward` failed since the
                last step; the gradient is dropped.
        """
        failed = model.take_incomplete(seq_id)
        if failed:
            await self._backend.drop_gradient(model.model_id)
            raise InvalidRequestError(
                f"optim_step: forward_backward with seq_id {', '.join(map(str, failed))} failed, so the "
                "gradient would be of part of a batch. It is dropped and the weights are as they were: "
                "send the whole batch again, or without what failed"
            )
        return await self._backend.optim_step(model.model_id, params)

    async def load(self, model: Model, stored: Stored, *, optimizer: bool, seq_id: int = 0) -> LoadedState:
        with self._storage.reading(stored) as folder:
            await self._backend.load_state(model.model_id, folder, optimizer=optimizer)
        model.take_incomplete(seq_id)
        return LoadedState(path=str(stored.path), model_id=model.model_id)

    async def save_state(
        self,
        model: Model,
        name: str,
        *,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Metadata | None,
    ) -> SavedState:
        stored = await self._save(model, "training", name, overwrite, ttl_seconds, user_metadata)
        return SavedState(path=str(stored.path))

    async def save_sampler(
        self, model: Model, name: str, *, ttl_seconds: int | None, user_metadata: Metadata | None
    ) -> SavedSampler:
        stored = await self._save(model, "sampler", name, True, ttl_seconds, user_metadata)
        return SavedSampler(path=str(stored.path))

    async def _save(
        self,
        model: Model,
        kind: CheckpointKind,
        name: str,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Metadata | None,
    ) -> Stored:
        async def write(folder: Path) -> None:
            if kind == "training":
                await self._backend.save_state(model.model_id, folder)
            else:
                await self._backend.save_sampler(model.model_id, folder)

        model.has_saved = True
        return await self._storage.save(
            run_record(model),
            CheckpointPath(model_id=model.model_id, kind=kind, name=name),
            write,
            overwrite=overwrite,
            ttl_seconds=ttl_seconds,
            user_metadata=user_metadata,
        )

    async def snapshot(self, model: Model, sampling_session_id: str) -> SavedSampler:
        session = model.session
        self._sampling.check_new(sampling_session_id, session.owner)
        sampler = await self._samplers.take_snapshot(model.model_id, sampling_session_id, session.owner)
        source = Snapshot(model_id=model.model_id, sampler=sampler)
        try:
            if not self._sessions.is_live(session):
                raise GoneError(f"session {session.session_id} has ended")
            self._sampling.add(session, sampling_session_id, model.settings.base_model, source)
        except TinkerError as error:
            self._samplers.close_snapshot(model.model_id, sampler, str(error))
            raise
        return SavedSampler(sampling_session_id=sampling_session_id)


def run_record(model: Model) -> RunRecord:
    return RunRecord(
        model_id=model.model_id,
        session_id=model.session.session_id,
        owner_hash=owner_hash(model.session.owner),
        settings=model.settings,
        created_s=model.created_s,
        user_metadata=model.user_metadata,
    )
