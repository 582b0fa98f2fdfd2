"""The JSON bodies that clients send. A field that is not here is refused: none is silently without effect.

Numbers have to be numbers and finite; what they may be is checked further below, where their meaning is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rl.tinker.service.limits import MAX_SEQ_ID, MAX_TTL_S

Id = Annotated[str, Field(min_length=1, max_length=512)]
"""Of a session, model, request or sampling session."""
TinkerPath = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(max_length=512)]
SeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL_S)]
Metadata = Annotated[dict[str, str], Field(max_length=256)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    type: Annotated[str, Field(max_length=64)] | None = None
    """What the request is; its path says so already."""


# Sessions


class ClientConfigRequest(Message):
    sdk_version: Name = ""


class CreateSession(Message):
    tags: Annotated[list[Name], Field(max_length=256)] = []
    user_metadata: Metadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    """There are no projects here: it is without effect."""
    display_name: Name | None = None


class SessionHeartbeat(Message):
    session_id: Id


class FinishReason(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Message):
    reason: FinishReason
    detail: Annotated[str, Field(max_length=65_536)] | None = None


class TelemetryReport(BaseModel):
    """Thrown away; it only has to be an object."""

    model_config = ConfigDict(extra="allow")


# Models in training


class Lora(Message):
    rank: Annotated[int, Field(ge=0, le=65_536)]
    """0 trains all parameters, without adapters."""
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Message):
    version: int | None = None


class CreateModel(Message):
    session_id: Id
    model_seq_id: SeqId
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    """Left out or null trains all parameters."""
    optimizer_config: OptimizerConfig | None = None


class GetInfo(Message):
    model_id: Id


class Adam(Message):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Message):
    model_id: Id
    seq_id: SeqId
    adam_params: Adam | None = None
    optimizer_params: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Of optimizers other than Adam, of which there are none here."""


class SaveWeights(Message):
    model_id: Id
    seq_id: SeqId
    path: Name | None = None
    """The checkpoint's name."""
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(Message):
    model_id: Id
    seq_id: SeqId
    path: Name | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None


class LoadWeights(Message):
    """Into a new model (session_id and model_seq_id) or one that is there (model_id and seq_id)."""

    path: TinkerPath
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: SeqId | None = None
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Name | None = None


class UnloadModel(Message):
    model_id: Id


# Sampling


class CreateSamplingSession(Message):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: Name | None = None
    model_path: TinkerPath | None = None


class Chunk(BaseModel):
    """A part of a prompt. Only text is taken; fields of other kinds are let through to be refused by type."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Annotated[str, Field(max_length=64)] = "encoded_text"
    tokens: list[Token] = []


class Prompt(Message):
    chunks: Annotated[list[Chunk], Field(max_length=65_536)]


class SamplingParams(Message):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[str, Field(max_length=1024)]
        | Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=256)]
        | Annotated[list[Token], Field(max_length=256)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class Sample(Message):
    sampling_session_id: Id | None = None
    seq_id: SeqId | None = None
    num_samples: Annotated[int, Field(ge=1, lt=2**31)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = 0
    # What follows is refused unless it is off: see `training.py` and docs/tinker.md.
    base_model: Name | None = None
    model_path: TinkerPath | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


# Results and files


class RetrieveFuture(Message):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(Message):
    request_id: Id


class WeightsInfo(Message):
    tinker_path: TinkerPath


class SetTtl(Message):
    ttl_seconds: Ttl | None
    """Seconds from now; null: it never expires."""
