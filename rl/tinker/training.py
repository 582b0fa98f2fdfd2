"""Requests about models in training, from the official client's types to their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tinker import types as wire
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.codec import decode_data, encode_forward_backward, loss_settings
from rl.tinker.datums import find_loss, metrics_of, optim_params, wire_samples
from rl.tinker.futures import Parts, Request, Result
from rl.tinker.models import Model, Models, Work, check_lora, find_base
from rl.tinker.sampling import SamplingSessions
from rl.tinker.storage import Stored
from rl.tinker.types import (
    CheckpointKind,
    CheckpointPath,
    InvalidRequestError,
    ModelSettings,
    NotFoundError,
    TinkerError,
    check_metadata,
    check_name,
    check_seq_id,
    check_ttl,
)

_EITHER = (
    "load_weights: must have either session_id and model_seq_id, for a new model, or model_id and seq_id, for an "
    "existing one, without base_model"
)


class Training:
    """Requests of models in training; each returns a request id, whose result `Service.retrieve` returns.

    A repeated (model_id, seq_id) is the same request and is done once, whatever the repetition says. Seq ids count
    from 1. A request refused as invalid uses up its seq id, so that later ones do not wait for it; one refused
    with BusyError does not.

    Raises:
        InvalidRequestError: from any method; the text names the field.
        NotFoundError: session, model or checkpoint is unknown or belongs to another owner.
        GoneError: session or model has ended.
        BusyError: `limits.waiting` or `waiting_bytes` is reached.
        LimitReachedError: `limits.models` is reached.
    """

    def __init__(self, parts: Parts, *, models: Models, sampling: SamplingSessions) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._futures = parts.futures
        self._models = models
        self._sampling = sampling

    # Creation and end

    def create_model(self, body: wire.CreateModelRequest | wire.LoadWeightsRequest, *, owner: str) -> str:
        """Create model `<session_id>:train:<model_seq_id>`, to which requests may follow at once."""
        session = self._parts.sessions.live(str(body.session_id), owner)
        number = check_seq_id("model_seq_id", body.model_seq_id, first=0)
        model_id = f"{session.session_id}:train:{number}"
        request_id = f"{model_id}:0"
        if self._models.was_added(model_id):
            return request_id
        check_metadata(body.user_metadata)
        settings, stored = self._new_settings(body, owner)
        base = find_base(self._backend, settings.base_model)
        if settings.lora is not None:
            check_lora(settings.lora, base)
        self._models.check_room(owner)
        request = self._futures.begin(request_id, owner=owner)
        model = self._models.add(
            model_id, settings, base=base, session=session, user_metadata=body.user_metadata
        )

        async def work() -> Result:
            if isinstance(body, wire.CreateModelRequest):
                await self._create(model, None, optimizer=False)
                return wire.CreateModelResponse(model_id=model_id)
            await self._create(model, stored, optimizer=body.optimizer)
            return wire.LoadWeightsResponse(path=body.path, model_id=model_id)

        model.stream.submit(0, request, work)
        return request_id

    def load_weights(self, body: wire.LoadWeightsRequest, *, owner: str) -> str:
        """Load weights into a model of the same settings, except for the seed, or into a new model."""
        if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
            return self.create_model(body, owner=owner)
        if body.model_id is None:
            raise InvalidRequestError(_EITHER)

        def check(model: Model, seq_id: int) -> Work:
            if body.session_id is not None or body.model_seq_id is not None or body.base_model is not None:
                raise InvalidRequestError(_EITHER)
            stored = self._find_state(body, owner)
            if _seedless(stored.record.settings) != _seedless(model.settings):
                raise InvalidRequestError(
                    f"path={body.path}: has the weights of a model with {stored.record.settings}, but "
                    f"{body.model_id} has {model.settings}"
                )

            async def work() -> Result:
                await self._load(model, stored, optimizer=body.optimizer, seq_id=seq_id)
                return wire.LoadWeightsResponse(path=body.path, model_id=model.model_id)

            return work

        return self._submit(body.model_id, body.seq_id, check, owner=owner)

    def _new_settings(
        self, body: wire.CreateModelRequest | wire.LoadWeightsRequest, owner: str
    ) -> tuple[ModelSettings, Stored | None]:
        """Return the settings of a new model, and the weights that it starts from."""
        if isinstance(body, wire.CreateModelRequest):
            _check_optimizer(body.optimizer_config)
            lora = body.lora_config if body.lora_config is not None and body.lora_config.rank else None
            return ModelSettings(base_model=body.base_model, lora=lora), None
        stored = self._find_state(body, owner)
        return stored.record.settings, stored

    async def _create(self, model: Model, stored: Stored | None, *, optimizer: bool) -> None:
        try:
            await self._backend.create_model(model.model_id, model.settings)
            model.is_created = True
            if stored is not None:
                await self._load(model, stored, optimizer=optimizer, seq_id=0)
        except BaseException as error:
            reason = str(error) if isinstance(error, TinkerError) else "the server failed"
            await self._models.end(model, f"it could not be created: {reason}", when_idle=False)
            raise

    def unload(self, model_id: str, *, owner: str) -> str:
        """End a model: what waits fails, what runs is finished. Checkpoints and samplers stay."""
        request_id = f"{model_id}:unload"
        self._parts.sessions.live(model_id, owner)
        if request_id in self._futures:
            return request_id
        model = self._models.live(model_id, owner)
        request = self._futures.begin(request_id, owner=owner, unblocks=True)

        async def unloaded() -> Result:
            await self._models.end(model, "it was unloaded")
            return wire.UnloadModelResponse(model_id=model_id)

        self._parts.background.start(self._futures.run(request, unloaded), f"end of {model_id}")
        return request_id

    # Steps

    def forward_backward(self, message: pb.ForwardBackwardRequest, *, max_values: int, owner: str) -> str:
        """Add to the gradient. If the call fails, so does the next `optim_step`, which would step with part of a
        batch."""
        backward = not message.forward_only

        def check(model: Model, seq_id: int) -> Work:
            with model.adding(seq_id, backward=backward):
                loss = find_loss(message.loss_fn)
                built = loss.build(loss_settings(message))
                data = decode_data(message, max_values=max_values)
                samples = wire_samples(data, loss, model.base)

            async def work() -> Result:
                with model.adding(seq_id, backward=backward):
                    result = await self._backend.forward_backward(
                        model.model_id, samples.samples, loss=built, backward=backward
                    )
                assert result.logprobs is not None
                return encode_forward_backward(samples.logprobs(result.logprobs), metrics_of(result, loss))

            return work

        num_bytes = message.ByteSize()
        return self._submit(message.model_id, message.seq_id, check, owner=owner, num_bytes=num_bytes)

    def optim_step(self, body: wire.OptimStepRequest, *, owner: str) -> str:
        def check(model: Model, seq_id: int) -> Work:
            if not isinstance(body.optim_params, wire.AdamParams):
                raise InvalidRequestError("optimizer_params: this server has Adam only; give adam_params")
            settings = optim_params(body.optim_params)

            async def work() -> Result:
                if failed := model.take_incomplete(seq_id):
                    await self._backend.drop_gradient(model.model_id)
                    raise InvalidRequestError(
                        f"optim_step: forward_backward with seq_id {', '.join(map(str, failed))} failed, so the "
                        "gradient would be that of part of a batch. It is dropped and the weights stay as they "
                        "were: send the whole batch again, or without the data that failed"
                    )
                result = await self._backend.optim_step(model.model_id, settings)
                return wire.OptimStepResponse(metrics={"grad_norm:mean": result.grad_norm})

            return work

        return self._submit(body.model_id, body.seq_id, check, owner=owner)

    # Checkpoints

    async def _load(self, model: Model, stored: Stored, *, optimizer: bool, seq_id: int) -> None:
        await self._backend.load_model(model.model_id, stored.data, optimizer=optimizer)
        model.take_incomplete(seq_id)

    def save_weights(self, body: wire.SaveWeightsRequest, *, owner: str) -> str:
        """Save weights and optimizer state; without a name, under the seq id. A name that is taken fails without
        `overwrite`."""

        def check(model: Model, seq_id: int) -> Work:
            name = f"{seq_id:06d}" if body.path is None else body.path
            answer = partial(wire.SaveWeightsResponse, type="save_weights")
            return self._saving(model, "training", name, body, answer, overwrite=body.overwrite)

        return self._submit(body.model_id, body.seq_id, check, owner=owner)

    def save_weights_for_sampler(self, body: wire.SaveWeightsForSamplerRequest, *, owner: str) -> str:
        """Save weights to sample from under `path`, replacing what has it; or, with `sampling_session_seq_id`
        in its place, publish them in memory as a sampling session."""

        def check(model: Model, seq_id: int) -> Work:
            number = body.sampling_session_seq_id
            answer = partial(wire.SaveWeightsForSamplerResponseInternal, type="save_weights_for_sampler")
            if body.kind != "snapshot":
                raise InvalidRequestError(
                    f"kind: {body.kind!a}, must be 'snapshot': the weights of a sampler never change here"
                )
            if (body.path is None) == (number is None):
                raise InvalidRequestError(
                    f"path={body.path!r}, sampling_session_seq_id={number!r}: give one of them"
                )
            if body.path is None:
                new_id = self._sampling.id_of(model.session, number)

                async def snapshot() -> Result:
                    await self._sampling.publish(model.model_id, new_id, model.session, model.base)
                    return answer(sampling_session_id=new_id)

                return snapshot
            return self._saving(model, "sampler", body.path, body, answer, overwrite=True)

        return self._submit(body.model_id, body.seq_id, check, owner=owner)

    def _saving(
        self,
        model: Model,
        kind: CheckpointKind,
        name: str,
        body: wire.SaveWeightsRequest | wire.SaveWeightsForSamplerRequest,
        answer: Callable[..., Result],
        *,
        overwrite: bool,
    ) -> Work:
        """Check a save and return its work, whose result is the `answer` with the path."""
        check_name(name)
        check_ttl(body.ttl_seconds)
        check_metadata(body.user_metadata)

        async def write(folder: Path) -> None:
            await self._backend.save_model(model.model_id, folder, optimizer=kind == "training")

        async def work() -> Result:
            path = CheckpointPath(model_id=model.model_id, kind=kind, name=name)
            await self._parts.storage.save(
                model.record,
                path,
                write,
                overwrite=overwrite,
                ttl_seconds=body.ttl_seconds,
                user_metadata=body.user_metadata,
            )
            return answer(path=str(path))

        return work

    def _find_state(self, body: wire.LoadWeightsRequest, owner: str) -> Stored:
        _check_optimizer(body.optimizer_config)
        if body.weights_access_token is not None:
            raise InvalidRequestError(
                "weights_access_token: must be left out, other keys' weights are private"
            )
        return self._parts.storage.find_weights(body.path, "training", owner, base_model=body.base_model)

    # Submission

    def _submit(
        self,
        model_id: str,
        seq_id: int | None,
        check: Callable[[Model, int], Work],
        *,
        owner: str,
        num_bytes: int = 0,
    ) -> str:
        """Queue a request in its model's stream; `check` validates it and returns its work."""
        self._parts.sessions.live(model_id, owner)
        number = check_seq_id("seq_id", seq_id, first=1)
        request_id = f"{model_id}:{number}"
        if request_id in self._futures:
            return request_id
        model = self._models.live(model_id, owner)
        if model.stream.has_passed(number):
            return request_id

        def begin(*, unblocks: bool) -> Request:
            return self._futures.begin(request_id, owner=owner, num_bytes=num_bytes, unblocks=unblocks)

        try:
            work = check(model, number)
        except (InvalidRequestError, NotFoundError) as error:
            request = begin(unblocks=True)
            self._futures.fail([request], str(error))
            model.stream.submit(number, request, _refused)
            raise
        model.stream.submit(number, begin(unblocks=model.stream.unblocks(number)), work)
        return request_id


async def _refused() -> Result:
    raise AssertionError("the request has failed already")


def _check_optimizer(config: wire.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidRequestError(f"optimizer_config.type: {config.type!a:.100}, must be 'adamw'")


def _seedless(settings: ModelSettings) -> ModelSettings:
    lora = settings.lora
    return settings if lora is None else replace(settings, lora=lora.model_copy(update={"seed": None}))
