"""The JSON bodies that the server sends at once. Results of work are in `results.py`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from rl.tinker import types
from rl.tinker.service import responses


class Answer(BaseModel):
    pass


class ErrorAnswer(Answer):
    detail: str
    """What is wrong: field, value and what is valid."""


class TryAgain(Answer):
    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active"] = "active"
    queue_state_reason: str


class Health(Answer):
    status: Literal["ok"] = "ok"


class ClientConfig(Answer):
    """Which of its features the client shall use. Those that it leaves out are at the client's defaults."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    parallel_fwdbwd_chunks: bool = True
    fwdbwd_max_chunk_len: int
    fwdbwd_max_chunk_bytes_count: int


class DynamicConfig(Answer):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True


class SupportedModel(Answer):
    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(Answer):
    supported_models: list[SupportedModel]


class CreatedSession(Answer):
    type: Literal["create_session"] = "create_session"
    session_id: str


class Heard(Answer):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Accepted(Answer):
    status: Literal["accepted"] = "accepted"


class Session(Answer):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None


class SessionList(Answer):
    sessions: list[str]


class Future(Answer):
    """Work that was taken on."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class ModelData(Answer):
    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Answer):
    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int | None


class CreatedSamplingSession(Answer):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class Sampler(Answer):
    sampler_id: str
    base_model: str
    model_path: str | None


class Checkpoint(Answer):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool = False
    user_metadata: dict[str, str] | None
    expires_at: datetime | None

    @staticmethod
    def of(checkpoint: responses.Checkpoint) -> Checkpoint:
        return Checkpoint(
            checkpoint_id=checkpoint.checkpoint_id,
            checkpoint_type=checkpoint.kind,
            time=checkpoint.created,
            tinker_path=checkpoint.path,
            size_bytes=checkpoint.size_bytes,
            user_metadata=metadata(checkpoint.user_metadata),
            expires_at=checkpoint.expires,
        )


class Cursor(Answer):
    offset: int
    limit: int
    total_count: int


class CheckpointList(Answer):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None


class TrainingRun(Answer):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None
    corrupted: bool = False
    last_request_time: datetime
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None
    user_metadata: dict[str, str] | None

    @staticmethod
    def of(run: responses.TrainingRun, *, owner: str) -> TrainingRun:
        last, last_sampler = run.last_checkpoint, run.last_sampler_checkpoint
        return TrainingRun(
            training_run_id=run.training_run_id,
            base_model=run.settings.base_model,
            model_owner=owner,
            is_lora=run.settings.lora is not None,
            lora_rank=None if run.settings.lora is None else run.settings.lora.rank,
            last_request_time=run.last_request,
            last_checkpoint=None if last is None else Checkpoint.of(last),
            last_sampler_checkpoint=None if last_sampler is None else Checkpoint.of(last_sampler),
            user_metadata=metadata(run.user_metadata),
        )


class TrainingRunList(Answer):
    training_runs: list[TrainingRun]
    cursor: Cursor


class WeightsInfo(Answer):
    """What a model must be to load these weights."""

    base_model: str
    is_lora: bool
    lora_rank: int | None
    train_unembed: bool | None
    train_mlp: bool | None
    train_attn: bool | None

    @staticmethod
    def of(settings: types.ModelSettings) -> WeightsInfo:
        lora = settings.lora
        return WeightsInfo(
            base_model=settings.base_model,
            is_lora=lora is not None,
            lora_rank=None if lora is None else lora.rank,
            train_unembed=None if lora is None else lora.train_unembed,
            train_mlp=None if lora is None else lora.train_mlp,
            train_attn=None if lora is None else lora.train_attn,
        )


def cursor(page: responses.Page) -> Cursor:
    return Cursor(offset=page.offset, limit=page.limit, total_count=page.total)


def metadata(values: responses.Metadata | None) -> dict[str, str] | None:
    """As texts, which is all that the wire has; clients in this process may use more."""
    return None if values is None else {key: str(value) for key, value in values.items()}
