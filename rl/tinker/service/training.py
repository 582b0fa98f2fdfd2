"""Requests about models in training, each model's in the order of their seq ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl.tinker.adam import check_adam
from rl.tinker.backend import Backend
from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import AdamParams, Datum, LossCall, ModelSettings
from rl.tinker.service.checks import check_data, check_ttl, find_base
from rl.tinker.service.limits import Limits
from rl.tinker.service.model_work import ModelWork
from rl.tinker.service.models import Model, Models
from rl.tinker.service.names import check_name, parse_path
from rl.tinker.service.responses import Metadata, ModelInfo, Submitted
from rl.tinker.service.sampling import SamplingSessions
from rl.tinker.service.sessions import check_metadata
from rl.tinker.service.sizes import data_bytes
from rl.tinker.service.storage import Storage, Stored
from rl.tinker.service.streams import Work
from rl.tinker.service.submission import Submission


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
        models: Models,
        submission: Submission,
        sampling: SamplingSessions,
        work: ModelWork,
        limits: Limits,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._models = models
        self._submission = submission
        self._sampling = sampling
        self._work = work
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
        return self._submission.create(
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

        return self._submission.create(
            session_id,
            model_seq_id,
            settings,
            lambda model: self._work.create_from_state(model, found[0], optimizer=optimizer),
            user_metadata=user_metadata,
            owner=owner,
        )

    def load_state(self, model_id: str, seq_id: int, path: str, *, optimizer: bool, owner: str) -> Submitted:
        """-> LoadedState. Into a model that is there, whose settings are the checkpoint's but for the
        seed."""

        def work(model: Model) -> Work:
            stored = self._find_state(path, owner)
            if _seedless(stored.record.settings) != _seedless(model.settings):
                raise InvalidRequestError(
                    f"{path} is of a model with {stored.record.settings}, and {model_id} has {model.settings}"
                )
            return lambda: self._work.load(model, stored, optimizer=optimizer, seq_id=seq_id)

        return self._submission.submit(model_id, seq_id, work, owner=owner)

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
        """-> ForwardBackwardOutput. Where one fails that was to add to the gradient, so does the next
        `optim_step`, which would step with part of a batch."""

        def work(model: Model) -> Work:
            with model.adding(seq_id, backward=backward):
                check_data(data, self._limits)
                self._backend.check_data(model.settings, data, loss)
            return lambda: self._work.forward_backward(model, seq_id, data, loss, backward=backward)

        return self._submission.submit(model_id, seq_id, work, owner=owner, num_bytes=data_bytes(data))

    def optim_step(self, model_id: str, seq_id: int, params: AdamParams, *, owner: str) -> Submitted:
        """-> OptimStepOutput."""

        def work(model: Model) -> Work:
            check_adam(params)
            return lambda: self._work.optim_step(model, seq_id, params)

        return self._submission.submit(model_id, seq_id, work, owner=owner)

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

        return self._submission.submit(model_id, seq_id, work, owner=owner)

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

        return self._submission.submit(model_id, seq_id, work, owner=owner)

    def refuse(
        self, model_id: str, seq_id: int, error: InvalidRequestError, *, backward: bool = False, owner: str
    ) -> None:
        """Raise `error`, for a request that a transport could not make a call of, when its turn is taken.

        Without effect for one that has come before.

        Args:
            backward: it was to add to the gradient.
        """

        def work(model: Model) -> Work:
            with model.adding(seq_id, backward=backward):
                raise error

        self._submission.submit(model_id, seq_id, work, owner=owner)

    def unload(self, model_id: str, *, owner: str) -> Submitted:
        """-> UnloadedModel. What waits fails; what runs is finished first. Checkpoints and samplers stay."""
        return self._submission.unload(model_id, owner=owner)

    def info(self, model_id: str, *, owner: str) -> ModelInfo:
        model = self._models.live(model_id, owner)
        base = find_base(self._backend, model.settings.base_model)
        return ModelInfo(model_id=model_id, settings=model.settings, base=base)

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
