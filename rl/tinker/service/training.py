"""Requests about models in training, from the official client's types to their results.

The way of a `forward_backward` to the engine:

    rl/tinker/app.py           gives the call its path: `TrainingCalls.post_forward_backward`
    wire/codec.py              `read_forward_backward` decodes the body
    service/training.py        `TrainingCalls.forward_backward` submits `compute`
    service/streams.py         `ModelStream.submit` accepts the request, whose id the client gets at
                               once; the stream's task comes to `_complete_next` in its turn
    service/futures.py         `Futures.complete` calls `compute`
    service/training.py        `compute` locks the trainer, and calls its method:
    rl/engine_client.py        `EngineClient.forward_backward`, and from there `call_engine`
    actors/cluster/clients.py  only over actors: `TrainerClient.call_engine` calls the endpoint
    actors/trainer.py          only over actors: `PolicyTrainer.call_engine` on each rank, in the
                               engine's thread; actors/tinker.py finds the engine of the model
    rl/training/engine.py      `TrainingEngine.forward_backward`

The way of its result to the client:

    service/training.py        `compute` encodes the result by `encode_forward_backward` (codec.py)
    service/futures.py         `Futures.complete` stores it
    service/service.py         `Service.retrieve_future` returns it to the client, who asks for it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from fastapi import Request
from tinker import types as wire

from rl.models.lora import LoRA
from rl.tinker.backend import TinkerBackend
from rl.tinker.base_model import make_lora_config
from rl.tinker.service.futures import Answer, Background, Futures, encode_message
from rl.tinker.service.ledger import Ledgers
from rl.tinker.service.sampling import SamplingSessions
from rl.tinker.service.sessions import KEPT, Session, Sessions
from rl.tinker.service.storage import (
    CheckpointKind,
    RunRecord,
    Storage,
    Stored,
    check_name,
    make_path,
)
from rl.tinker.service.streams import ModelStream
from rl.tinker.types import (
    Future,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    Limits,
    ModelSettings,
    NotFoundError,
    Owner,
    check_base,
    check_metadata,
    check_seq_id,
    check_ttl,
)
from rl.tinker.wire.codec import (
    ForwardBackwardBody,
    encode_forward_backward,
    read_forward_backward,
)
from rl.tinker.wire.datums import check_optim_params

_EITHER = (
    "load_weights: must have either session_id and model_seq_id, for a new model, or model_id and "
    "seq_id, for an existing one, without base_model"
)


class TrainingCalls:
    """Calls about models in training.

    Each finds its model's stream, checks the request, and submits the work that the stream does in
    its turn. Seq ids count from 1. A request refused as invalid uses up its seq id, so that later
    ones do not wait for it; one refused with BusyError does not.
    """

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage: Storage,
        sessions: Sessions,
        futures: Futures,
        background: Background,
        sampling: SamplingSessions,
        limits: Limits,
        wall_time_s: Callable[[], float],
        ledgers: Ledgers | None = None,
    ) -> None:
        """
        Args:
            wall_time_s: returns the Unix time, by which runs are stamped.
            ledgers: record what models train; None: nothing is recorded.
        """
        self._backend = backend
        self._storage = storage
        self._sessions = sessions
        self._futures = futures
        self._background = background
        self._sampling = sampling
        self._limits = limits
        self._wall_time_s = wall_time_s
        self._ledgers = ledgers
        self._decoding = asyncio.Lock()
        """FIFO lock of all bodies, for which an owner waits with one body at a time: so owners take
        turns.
        """
        self._decoding_of = WeakValueDictionary[str, asyncio.Lock]()
        """Lock of each owner's bodies."""

    # Creation and end

    async def create_model(self, body: wire.CreateModelRequest, *, owner: Owner) -> Future:
        """Create a model, to which requests may follow at once."""
        return self._create_model(body, owner)

    async def load_weights(self, body: wire.LoadWeightsRequest, *, owner: Owner) -> Future:
        """Load weights into a model of the same settings, except for the seed, or into a new
        model.
        """
        if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
            return self._create_model(body, owner)
        if body.model_id is None:
            raise InvalidRequestError(_EITHER)
        stream = self._find_stream(body.model_id, owner)
        try:
            stored = self._check_load(body, stream)
        except (InvalidRequestError, NotFoundError) as error:
            return stream.refuse(body.seq_id, error)

        async def load() -> Answer:
            async with self._backend.lock_trainer(owner) as trainer:
                await trainer.load_model(
                    stream.model_id, str(stored.data), optimizer=body.optimizer
                )
            # The gradient of an incomplete batch went with the old weights.
            stream.failed.clear()
            _note_load(stream, stored)
            return wire.LoadWeightsResponse(path=body.path, model_id=stream.model_id)

        return stream.submit(body.seq_id, load)

    def _check_load(self, body: wire.LoadWeightsRequest, stream: ModelStream) -> Stored:
        """Return the checkpoint to load into an existing model."""
        new_model = (body.session_id, body.model_seq_id, body.base_model)
        if any(value is not None for value in new_model):
            raise InvalidRequestError(_EITHER)
        stored = self._find_state(body, stream.owner)
        if _drop_seed(stored.record.settings) != _drop_seed(stream.settings):
            raise InvalidRequestError(
                f"path={body.path}: has the weights of a model with {stored.record.settings}, "
                f"but {stream.model_id} has {stream.settings}"
            )
        return stored

    async def get_info(self, body: wire.GetInfoRequest, *, owner: Owner) -> wire.GetInfoResponse:
        """Return a model's base model, tokenizer and rank."""
        stream = self.find_live_stream(body.model_id, owner)
        base, lora = self._backend.base_model, stream.settings.lora
        return wire.GetInfoResponse(
            model_id=stream.model_id,
            model_name=base.name,
            model_data=wire.ModelData(
                arch=base.architecture, model_name=base.name, tokenizer_id=base.tokenizer_folder
            ),
            is_lora=lora is not None,
            lora_rank=None if lora is None else lora.rank,
        )

    def find_live_stream(self, model_id: str, owner: str) -> ModelStream:
        """Return the stream of a model that accepts requests, and keep its session alive."""
        stream = self._find_stream(model_id, owner)
        if stream.ended is not None:
            raise GoneError(stream.gone)
        return stream

    def _find_stream(self, model_id: str, owner: str) -> ModelStream:
        """Return a model's stream, which may have ended, and keep its session alive."""
        stream = self._sessions.find_live(model_id, owner).streams.get(model_id)
        if stream is None:
            raise NotFoundError(f"there is no model {model_id!r:.100}")
        return stream

    def _create_model(
        self, body: wire.CreateModelRequest | wire.LoadWeightsRequest, owner: str
    ) -> Future:
        session = self._sessions.find_live(str(body.session_id), owner)
        number = check_seq_id("model_seq_id", body.model_seq_id, first=0)
        model_id = f"{session.session_id}:train:{number}"
        future = Future(request_id=f"{model_id}:0", model_id=model_id)
        if model_id in session.streams:
            return future
        check_metadata(body.user_metadata)
        stored = None
        if isinstance(body, wire.LoadWeightsRequest):
            stored = self._find_state(body, owner)
            settings = stored.record.settings
        else:
            _check_optimizer(body.optimizer_config)
            has_lora = body.lora_config is not None and body.lora_config.rank
            lora = body.lora_config if has_lora else None
            # A checkpoint has the model's own name, whatever the script calls it.
            name = self._backend.base_model.resolve_alias(body.base_model)
            settings = ModelSettings(base_model=name or body.base_model, lora=lora)
        adapters = self._make_adapters(settings)

        # All checks come first: from here on the model's id is used up.
        self._check_room(settings, owner)
        request = self._futures.accept(future.request_id, owner=owner)
        record = RunRecord(
            model_id=model_id,
            owner_hash=owner,
            settings=settings,
            created_s=self._wall_time_s(),
            user_metadata=body.user_metadata,
        )
        stream = self._add_stream(session, record)

        async def create() -> Answer:
            async with self._backend.lock_trainer(owner) as trainer:
                await trainer.create_model(model_id, adapters)
                # Loading the weights may fail, and the model has to be deleted then too.
                stream.is_created = True
                if isinstance(body, wire.CreateModelRequest):
                    return wire.CreateModelResponse(model_id=model_id)
                assert stored is not None
                await trainer.load_model(model_id, str(stored.data), optimizer=body.optimizer)
                _note_load(stream, stored)
            return wire.LoadWeightsResponse(path=body.path, model_id=model_id)

        stream.submit_creation(request, create)
        return future

    def _make_adapters(self, settings: ModelSettings) -> LoRA.Config | None:
        """Return a new model's adapters; raise InvalidRequestError if it cannot be trained."""
        base = self._backend.base_model
        check_base(base, settings.base_model)
        if settings.lora is not None:
            return make_lora_config(settings.lora, base)
        if base.min_lora_rank:
            raise InvalidRequestError(
                f"lora_config.rank=0: must be {base.min_lora_rank} to {base.max_lora_rank}, this "
                "server trains adapters only"
            )
        return None

    def _add_stream(self, session: Session, record: RunRecord) -> ModelStream:
        # Models that have ended stay, so that a repeated creation is known as one.
        ended = [i for i, stream in session.streams.items() if not stream.in_memory]
        for i in ended[:-KEPT]:
            del session.streams[i]
        ledger = None
        if self._ledgers is not None:
            ledger = self._ledgers.open(self._storage.get_ledger(record.model_id), record)
        stream = ModelStream(
            record,
            backend=self._backend,
            futures=self._futures,
            background=self._background,
            gap_timeout_s=self._limits.gap_timeout_s,
            ledger=ledger,
        )
        session.streams[record.model_id] = stream
        return stream

    def _check_room(self, settings: ModelSettings, owner: str) -> None:
        """Raise LimitReachedError if there is no room for another model."""
        most, streams = self._limits.models, self._sessions.list_all_streams()
        if sum(stream.owner == owner for stream in streams) >= most:
            raise LimitReachedError(
                f"limit models: {most} are in memory; finish the session of one"
            )
        # Weights, gradient and two moments of Adam, in float32.
        self._sampling.weights.make_room(
            owner, 16 * self._backend.base_model.count_trained(settings.lora)
        )

    # Steps

    async def post_forward_backward(self, request: Request, *, owner: Owner) -> Future:
        """Decode a body in a thread, and submit what it asks for."""
        async with self._decoding_of.setdefault(owner, asyncio.Lock()), self._decoding:
            body = await asyncio.to_thread(self.decode, await request.body())
        return await self.forward_backward(body, owner=owner)

    def decode(self, body: bytes) -> ForwardBackwardBody:
        """Decode and translate a body; takes long for a large one."""
        return read_forward_backward(body, base=self._backend.base_model)

    async def forward_backward(self, body: ForwardBackwardBody, *, owner: Owner) -> Future:
        """Add to the gradient; if this fails, so does the next `optim_step`."""
        stream = self._find_stream(body.model_id, owner)
        content = body.content
        if isinstance(content, InvalidRequestError):
            return stream.refuse(body.seq_id, content, adds_gradient=body.backward)

        # In the stream's turn; until then the request holds its decoded samples.
        async def compute() -> Answer:
            samples = content.samples.samples
            async with self._backend.lock_trainer(owner) as trainer:
                if body.backward:
                    result = await trainer.forward_backward(
                        samples,
                        loss=content.loss,
                        return_logprobs=True,
                        return_trained=stream.ledger is not None,
                        model_id=stream.model_id,
                    )
                else:
                    result = await trainer.forward(
                        samples, loss=content.loss, model_id=stream.model_id
                    )
            if body.backward and stream.ledger is not None:
                await stream.ledger.add(body.seq_id, samples, loss=content.loss, result=result)
            message = partial(encode_forward_backward, content, result)
            num_bytes = sum(values.nbytes for values in result.logprobs or ())
            return await encode_message(message, num_bytes=num_bytes)

        return stream.submit(
            body.seq_id, compute, num_bytes=body.num_bytes, adds_gradient=body.backward
        )

    async def optim_step(self, body: wire.OptimStepRequest, *, owner: Owner) -> Future:
        """Step with the accumulated gradient; without one, with zeros."""
        stream = self._find_stream(body.model_id, owner)
        try:
            params = check_optim_params(body.optim_params)
        except InvalidRequestError as error:
            return stream.refuse(body.seq_id, error)

        async def step() -> Answer:
            async with self._backend.lock_trainer(owner) as trainer:
                if stream.failed:
                    failed = ", ".join(map(str, stream.failed))
                    stream.failed.clear()
                    await trainer.drop_gradient(model_id=stream.model_id)
                    stream.note_drop()
                    raise InvalidRequestError(
                        f"optim_step: forward_backward with seq_id {failed} failed, so the "
                        "gradient would be that of part of a batch. It is dropped and the "
                        "weights stay as they were: send the whole batch again, or without the "
                        "data that failed"
                    )
                try:
                    # The API steps without a gradient too, with zeros.
                    result = await trainer.optim_step(
                        params, allow_empty=True, model_id=stream.model_id
                    )
                except Exception:
                    # Such as one that is not finite.
                    stream.note_drop()
                    raise
            if stream.ledger is not None:
                await stream.ledger.step(body.seq_id or 0, params, result)
            return wire.OptimStepResponse(metrics={"grad_norm:mean": result.grad_norm})

        return stream.submit(body.seq_id, step)

    # Checkpoints

    async def save_weights(self, body: wire.SaveWeightsRequest, *, owner: Owner) -> Future:
        """Save weights and optimizer state; without a name, under the seq id."""
        stream = self._find_stream(body.model_id, owner)
        name = f"{body.seq_id or 0:06d}" if body.path is None else body.path
        answer = partial(wire.SaveWeightsResponse, type="save_weights")
        return self._save(stream, "training", name, body, answer, overwrite=body.overwrite)

    async def save_weights_for_sampler(
        self, body: wire.SaveWeightsForSamplerRequest, *, owner: Owner
    ) -> Future:
        """Save weights to sample from under `path`, replacing what has it; or, with
        `sampling_session_seq_id` in its place, publish them in memory as a sampling session."""
        stream = self._find_stream(body.model_id, owner)
        answer = partial(
            wire.SaveWeightsForSamplerResponseInternal, type="save_weights_for_sampler"
        )
        session = self._sessions.find_live(stream.model_id, owner)
        number = body.sampling_session_seq_id
        try:
            _check_save_for_sampler(body)
            new_id = None if number is None else self._sampling.make_id(session, number)
        except InvalidRequestError as error:
            return stream.refuse(body.seq_id, error)
        if new_id is None:
            return self._save(stream, "sampler", str(body.path), body, answer, overwrite=True)

        async def publish() -> Answer:
            await self._sampling.publish(stream, session=session, new_id=new_id)
            return answer(sampling_session_id=new_id)

        return stream.submit(body.seq_id, publish)

    def _save(
        self,
        stream: ModelStream,
        kind: CheckpointKind,
        name: str,
        body: wire.SaveWeightsRequest | wire.SaveWeightsForSamplerRequest,
        answer: Callable[..., Answer],
        *,
        overwrite: bool,
    ) -> Future:
        """Submit a save under a name, whose answer is `answer(path=...)`."""
        try:
            check_name(name)
            check_ttl(body.ttl_seconds)
            check_metadata(body.user_metadata)
        except InvalidRequestError as error:
            return stream.refuse(body.seq_id, error)
        path = make_path(stream.model_id, kind, name)

        async def write(folder: Path) -> None:
            async with self._backend.lock_trainer(stream.owner) as trainer:
                await trainer.save_model(stream.model_id, str(folder), optimizer=kind == "training")

        async def save() -> Answer:
            await self._storage.save(
                stream.record,
                path,
                write,
                overwrite=overwrite,
                ttl_seconds=body.ttl_seconds,
                user_metadata=body.user_metadata,
                ledger=None if stream.ledger is None else stream.ledger.mark,
            )
            return answer(path=path.tinker_path)

        return stream.submit(body.seq_id, save)

    def _find_state(self, body: wire.LoadWeightsRequest, owner: str) -> Stored:
        _check_optimizer(body.optimizer_config)
        if body.weights_access_token is not None:
            raise InvalidRequestError(
                "weights_access_token: must be left out, other keys' weights are private"
            )
        name = self._backend.base_model.resolve_alias(body.base_model)
        return self._storage.find_weights(body.path, "training", owner, base_model=name)


def _check_optimizer(config: wire.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidRequestError(f"optimizer_config.type: {config.type!a:.100}, must be 'adamw'")


def _check_save_for_sampler(body: wire.SaveWeightsForSamplerRequest) -> None:
    if body.kind != "snapshot":
        raise InvalidRequestError(
            f"kind: {body.kind!a}, must be 'snapshot': the weights of a sampler never change here"
        )
    number = body.sampling_session_seq_id
    if (body.path is None) == (number is None):
        raise InvalidRequestError(
            f"path={body.path!r}, sampling_session_seq_id={number!r}: give one of them"
        )


def _note_load(stream: ModelStream, stored: Stored) -> None:
    if stream.ledger is not None:
        stream.ledger.note_load(stored.path.tinker_path, stored.record.ledger)


def _drop_seed(settings: ModelSettings) -> ModelSettings:
    lora = settings.lora
    return (
        settings if lora is None else replace(settings, lora=lora.model_copy(update={"seed": None}))
    )
