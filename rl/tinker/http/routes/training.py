"""Requests about models in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastapi import APIRouter, HTTPException, Request

from rl.tinker.errors import InvalidRequestError, TinkerError
from rl.tinker.http import answers, messages
from rl.tinker.http.codec import MEDIA_TYPE, decode_forward_backward, parse_forward_backward
from rl.tinker.http.context import Context, ContextOf, Owner
from rl.tinker.http.guard import media_type
from rl.tinker.messages import AdamParams, LoRASettings, ModelSettings
from rl.tinker.service.responses import Submitted

router = APIRouter(tags=["training"])


def _future(submitted: Submitted) -> answers.Future:
    return answers.Future(request_id=submitted.request_id, model_id=submitted.model_id)


@contextmanager
def _in_turn(
    context: Context, model_id: str | None, seq_id: int | None, owner: str, *, backward: bool = False
) -> Iterator[None]:
    """What is refused within it takes its turn among the model's requests: later ones do not wait for it."""
    try:
        yield
    except InvalidRequestError as error:
        if model_id is not None and seq_id is not None:
            with suppress(TinkerError):  # the refusal itself, or there is no such model
                context.service.training.refuse(model_id, seq_id, error, backward=backward, owner=owner)
        raise


@router.post("/create_model")
async def create_model(body: messages.CreateModel, context: ContextOf, owner: Owner) -> answers.Future:
    _check_optimizer(body.optimizer_config)
    settings = ModelSettings(base_model=body.base_model, lora=_lora(body.lora_config))
    return _future(
        context.service.training.create_model(
            body.session_id, body.model_seq_id, settings, user_metadata=body.user_metadata, owner=owner
        )
    )


def _check_optimizer(config: messages.OptimizerConfig | None) -> None:
    if config is not None and config.type not in (None, "adamw"):
        raise InvalidRequestError(f"optimizer_config.type: {config.type!a}, must be 'adamw'")


def _lora(config: messages.Lora | None) -> LoRASettings | None:
    if config is None or config.rank == 0:
        return None
    return LoRASettings(
        rank=config.rank,
        seed=config.seed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        train_unembed=config.train_unembed,
    )


@router.post("/get_info")
async def get_info(body: messages.GetInfo, context: ContextOf, owner: Owner) -> answers.ModelInfo:
    info = context.service.training.info(body.model_id, owner=owner)
    return answers.ModelInfo(
        model_id=info.model_id,
        model_name=info.base.name,
        model_data=answers.ModelData(
            arch=info.base.architecture,
            model_name=info.base.name,
            tokenizer_id=info.base.tokenizer_folder,
        ),
        is_lora=info.settings.lora is not None,
        lora_rank=None if info.settings.lora is None else info.settings.lora.rank,
    )


@router.post(
    "/forward_backward",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def forward_backward(request: Request, context: ContextOf, owner: Owner) -> answers.Future:
    """A ForwardBackwardRequest of the official client's protobuf messages."""
    if media_type(request.headers) != MEDIA_TYPE:
        content_type = request.headers.get("content-type", "")
        raise HTTPException(415, f"Content-Type: {content_type!a}, must be {MEDIA_TYPE}")
    message = parse_forward_backward(await request.body())
    with _in_turn(context, message.model_id, message.seq_id, owner, backward=not message.forward_only):
        call = decode_forward_backward(message, max_values=context.limits.values_per_request)
    return _future(
        context.service.training.forward_backward(
            call.model_id, call.seq_id, call.data, call.loss, backward=call.backward, owner=owner
        )
    )


@router.post("/optim_step")
async def optim_step(body: messages.OptimStep, context: ContextOf, owner: Owner) -> answers.Future:
    with _in_turn(context, body.model_id, body.seq_id, owner):
        if body.optimizer_params is not None:
            raise InvalidRequestError("optimizer_params: this server has Adam only; give adam_params")
    adam = body.adam_params or messages.Adam()
    params = AdamParams(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )
    return _future(context.service.training.optim_step(body.model_id, body.seq_id, params, owner=owner))


@router.post("/save_weights")
async def save_weights(body: messages.SaveWeights, context: ContextOf, owner: Owner) -> answers.Future:
    return _future(
        context.service.training.save_state(
            body.model_id,
            body.seq_id,
            body.path,
            overwrite=body.overwrite,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
            owner=owner,
        )
    )


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: messages.SaveWeightsForSampler, context: ContextOf, owner: Owner
) -> answers.Future:
    with _in_turn(context, body.model_id, body.seq_id, owner):
        if body.kind != "snapshot":
            raise InvalidRequestError(
                f"kind: {body.kind!a} is not supported, must be 'snapshot'; a sampler's weights never change "
                "here"
            )
    return _future(
        context.service.training.save_sampler(
            body.model_id,
            body.seq_id,
            body.path,
            sampling_session_seq_id=body.sampling_session_seq_id,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
            owner=owner,
        )
    )


@router.post("/load_weights")
async def load_weights(body: messages.LoadWeights, context: ContextOf, owner: Owner) -> answers.Future:
    with _in_turn(context, body.model_id, body.seq_id, owner):
        _check_optimizer(body.optimizer_config)
        if body.weights_access_token is not None:
            raise InvalidRequestError(
                "weights_access_token: other keys' weights are not to be had; leave it out"
            )
        return _future(_load(body, context, owner))


def _load(body: messages.LoadWeights, context: Context, owner: str) -> Submitted:
    training = context.service.training
    there, new = (body.model_id, body.seq_id), (body.session_id, body.model_seq_id)
    if body.session_id is not None and body.model_seq_id is not None and there == (None, None):
        return training.create_from_state(
            body.session_id,
            body.model_seq_id,
            body.path,
            optimizer=body.optimizer,
            base_model=body.base_model,
            user_metadata=body.user_metadata,
            owner=owner,
        )
    if body.model_id is not None and body.seq_id is not None and new == (None, None):
        if body.base_model is not None:
            raise InvalidRequestError("base_model: belongs to a new model only; leave it out")
        return training.load_state(
            body.model_id, body.seq_id, body.path, optimizer=body.optimizer, owner=owner
        )
    raise InvalidRequestError(
        "load_weights: needs session_id and model_seq_id (a new model), or model_id and seq_id (one that is "
        "there), and not of both"
    )


@router.post("/unload_model")
async def unload_model(body: messages.UnloadModel, context: ContextOf, owner: Owner) -> answers.Future:
    return _future(context.service.training.unload(body.model_id, owner=owner))
