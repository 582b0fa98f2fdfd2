"""What the service answers: at once, as the result of a request, and about what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from rl.tinker.messages import BaseModel, ForwardBackwardOutput, ModelSettings, OptimStepOutput, SampleOutput

ItemT = TypeVar("ItemT")
Metadata: TypeAlias = Mapping[str, Any]
CheckpointKind = Literal["training", "sampler"]

# At once


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """Work that was taken on; its result comes from `Service.retrieve`."""

    request_id: str
    model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedSample:
    request_id: str
    sample_sequence_ids: tuple[str, ...]
    """One for each sample."""


# Results


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedModel:
    model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedState:
    path: str
    model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    path: str
    """`tinker://<model id>/weights/<name>`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSampler:
    """One of the two is there."""

    path: str | None = None
    """`tinker://<model id>/sampler_weights/<name>`, of named ones."""
    sampling_session_id: str | None = None
    """Of those without a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadedModel:
    model_id: str


Response: TypeAlias = (
    CreatedModel
    | LoadedState
    | ForwardBackwardOutput
    | OptimStepOutput
    | SavedState
    | SavedSampler
    | SampleOutput
    | UnloadedModel
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Of work that was taken on."""

    error: str
    """For whoever asked: without paths or other internals."""
    category: Literal["user", "server", "unknown"]


# What the service holds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    model_id: str
    settings: ModelSettings
    base: BaseModel


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInfo:
    session_id: str
    created: datetime
    tags: tuple[str, ...]
    display_name: str | None
    user_metadata: Metadata | None
    model_ids: tuple[str, ...]
    sampling_session_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerInfo:
    sampling_session_id: str
    base_model: str
    model_path: str | None
    """Of saved weights; None of base models and of snapshots without a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    path: str
    """`tinker://...`."""
    checkpoint_id: str
    """The path's last two parts: `weights/<name>` or `sampler_weights/<name>`."""
    kind: CheckpointKind
    settings: ModelSettings
    created: datetime
    """With a time zone, as all times here."""
    size_bytes: int
    expires: datetime | None
    user_metadata: Metadata | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    training_run_id: str
    """The model's id."""
    session_id: str
    settings: ModelSettings
    created: datetime
    last_request: datetime
    """Of runs that are not in memory: when something was last saved."""
    last_checkpoint: Checkpoint | None
    """For training."""
    last_sampler_checkpoint: Checkpoint | None
    user_metadata: Metadata | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Generic[ItemT]):
    """Some of a list."""

    items: tuple[ItemT, ...]
    offset: int
    limit: int
    total: int
