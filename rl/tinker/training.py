"""Requests about models in training, each model's in the order of their seq ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rl.tinker.backend import Backend
from rl.tinker.background import Background
from rl.tinker.checks import check_adam, check_data, check_seq_id, check_ttl, find_base
from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.futures import Futures
from rl.tinker.limits import Limits
from rl.tinker.messages import AdamParams, Datum, LossCall, ModelSettings
from rl.tinker.model_work import ModelWork
from rl.tinker.models import Model, Models
from rl.tinker.names import check_name, parse_path
from rl.tinker.responses import Metadata, ModelInfo, Response, Submitted, UnloadedModel
from rl.tinker.sampling import SamplingSessions
from rl.tinker.sessions import Sessions, check_metadata
from rl.tinker.sizes import data_bytes
from rl.tinker.storage import Storage, Stored
from rl.tinker.streams import Work


class Training:
    """Every submission may be repeated: the same (model_id, seq_id) is the same request and done once,
    whatever the repetition says. Seq ids count from 1. A request that is refused as invalid takes its turn
    too, so that later ones do not wait for it; one that is refused with BusyError does not, and is expected
    again.

    Raises:
        InvalidRequestError: of any submission, whose text names what is wrong.
        NotFoundError: session, model or checkpoint is unknown, or another's.
        GoneError: session or model have ended.
        BusyError: `limits.waiting`, `waiting_per_model` or `waiting_bytes`.
        LimitReachedError: `limits.models`, in `create_model` and `create_from_state`.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        storage: Storage,
        sessions: Sessions,
        models: Models,
        sampling: SamplingSessions,
        work: ModelWork,
        futures: Futures,
        background: Background,
        limits: Limits,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._sessions = sessions
        self._models = models
        self._sampling = sampling
        self._work = work
        self._futures = futures
        self._background = background
        self._limits = limits

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        settings: ModelSettings,
        *,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> CreatedModel. Its id is `<session_id>:train:<model_seq_id>`, and requests may follow at once."""
        return self._create(
            session_id,
            model_seq_id,
            lambda: settings,
            self._work.create,
            user_metadata=user_metadata,
            owner=owner,
        )

    def create_from_state(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        *,
        optimizer: bool,
        base_model: str | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> LoadedState. A new model with the settings and weights of `tinker://.../weights/<name>`.

        `base_model` is refused unless it is the checkpoint's.
        """
        found: list[Stored] = []

        def settings() -> ModelSettings:
            found.append(stored := self._find_state(path, owner))
            own = stored.record.settings
            if base_model not in (None, own.base_model):
                raise InvalidRequestError(
                    f"base_model is {base_model!r}, but {path} is of {own.base_model!r}"
                )
            return own

        return self._create(
            session_id,
            model_seq_id,
            settings,
            lambda model: self._work.create_from_state(model, found[0], optimizer=optimizer),
            user_metadata=user_metadata,
            owner=owner,
        )

    def _create(
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

    def load_state(self, model_id: str, seq_id: int, path: str, *, optimizer: bool, owner: str) -> Submitted:
        """-> LoadedState. Into a model that is there, whose settings are the checkpoint's but for the
        seed."""

        def work(model: Model) -> Work:
            stored = self._find_state(path, owner)
            if _seedless(stored.record.settings) != _seedless(model.settings):
                raise InvalidRequestError(
                    f"{path} is of a model with {stored.record.settings}, and {model_id} has {model.settings}"
                )
            return lambda: self._work.load(model, stored, optimizer=optimizer)

        return self._submit(model_id, seq_id, work, owner=owner)

    def forward_backward(
        self,
        model_id: str,
        seq_id: int,
        data: Sequence[Datum],
        loss: LossCall,
        *,
        backward: bool = True,
        owner: str,
    ) -> Submitted:
        """-> ForwardBackwardOutput."""

        def work(model: Model) -> Work:
            check_data(data, self._limits)
            self._backend.check_data(model.settings, data, loss)
            return lambda: self._backend.forward_backward(model_id, data, loss, backward=backward)

        return self._submit(model_id, seq_id, work, owner=owner, num_bytes=data_bytes(data))

    def optim_step(self, model_id: str, seq_id: int, params: AdamParams, *, owner: str) -> Submitted:
        """-> OptimStepOutput."""

        def work(model: Model) -> Work:
            check_adam(params)
            return lambda: self._backend.optim_step(model_id, params)

        return self._submit(model_id, seq_id, work, owner=owner)

    def save_state(
        self,
        model_id: str,
        seq_id: int,
        name: str | None,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> SavedState. `name` None: made from the seq id. A name that is taken fails without
        `overwrite`."""

        def work(model: Model) -> Work:
            new_name = f"{seq_id:06d}" if name is None else name
            self._check_save(new_name, ttl_seconds, user_metadata)
            return lambda: self._work.save_state(
                model,
                new_name,
                overwrite=overwrite,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            )

        return self._submit(model_id, seq_id, work, owner=owner)

    def save_sampler(
        self,
        model_id: str,
        seq_id: int,
        name: str | None,
        *,
        sampling_session_seq_id: int | None = None,
        ttl_seconds: int | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> SavedSampler. One of `name` and `sampling_session_seq_id`.

        A name that is taken gets the new weights. Without a name the weights stay in memory, as a sampling
        session of the model's session.
        """

        def work(model: Model) -> Work:
            if (name is None) == (sampling_session_seq_id is None):
                raise InvalidRequestError(
                    f"name is {name!r} and sampling_session_seq_id {sampling_session_seq_id!r}; one of "
                    "them is given"
                )
            if name is not None:
                self._check_save(name, ttl_seconds, user_metadata)
                return lambda: self._work.save_sampler(
                    model, name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
                )
            assert sampling_session_seq_id is not None
            new_id = self._sampling.id_of(model.session, sampling_session_seq_id)
            return lambda: self._work.snapshot(model, new_id)

        return self._submit(model_id, seq_id, work, owner=owner)

    def unload(self, model_id: str, *, owner: str) -> Submitted:
        """-> UnloadedModel. What waits fails; what runs is finished first. Checkpoints and samplers stay."""
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

    def info(self, model_id: str, *, owner: str) -> ModelInfo:
        model = self._models.live(model_id, owner)
        base = find_base(self._backend, model.settings.base_model)
        return ModelInfo(model_id=model_id, settings=model.settings, base=base)

    def _submit(
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

    def _find_state(self, path: str, owner: str) -> Stored:
        parsed = parse_path(path)
        if parsed.kind != "training":
            raise InvalidRequestError(
                f"path is {path}, weights to sample from; save_state saves those for training"
            )
        return self._storage.find(parsed, owner)

    def _check_save(self, name: str, ttl_seconds: int | None, user_metadata: Metadata | None) -> None:
        check_name(name, max_length=self._limits.name_length)
        check_ttl(ttl_seconds)
        check_metadata(user_metadata, max_bytes=self._limits.metadata_bytes)


def _seedless(settings: ModelSettings) -> ModelSettings:
    return settings if settings.lora is None else replace(settings, lora=replace(settings.lora, seed=None))
