"""What clients, service and backends say to each other, whatever the transport.

Frozen, keyword-only, slotted dataclasses with numpy arrays, as `rl/types.py` has them. Names of losses, their
inputs and settings are the wire's (docs/tinker.md).

Shape legend: N tokens of one datum or prompt, K targets of each, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRASettings:
    """What of the base model gets adapters."""

    rank: int
    seed: int | None = None
    """Of the adapters' first values; None draws one."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """The output head too; without effect where it shares the embedding's weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """What a model in training is."""

    base_model: str
    lora: LoRASettings | None
    """None trains all parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A model that a backend offers."""

    name: str
    architecture: str
    """Such as "qwen3"."""
    max_context_length: int
    """Tokens."""
    tokenizer_folder: str
    """A Hugging Face folder: what `get_tokenizer` opens."""
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datum:
    """One sequence of a `forward_backward`. Entry i of each input is about the prediction made at token i."""

    tokens: np.ndarray
    """[N] int32, what the model reads."""
    loss_inputs: Mapping[str, np.ndarray]
    """[N], or [N, K] for some of cross_entropy, float32 or int64; sparse ones made dense with zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCall:
    name: str
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBackwardOutput:
    logprobs: tuple[np.ndarray, ...]
    """For each datum [N] or [N, K] float32, nats, of its targets."""
    metrics: Mapping[str, float]
    """Named `name:reduction`; `loss:sum` is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamParams:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 is no clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStepOutput:
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn."""

    max_tokens: int | None = None
    """None: as far as the context goes."""
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    """Texts or token ids, which become part of what is returned. None: the tokenizer's end of text; empty:
    nothing ends a completion but its length."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 is off."""
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRequest:
    prompt: np.ndarray
    """[N] int32."""
    num_samples: int = 1
    sampling: Sampling = Sampling()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledSequence:
    tokens: np.ndarray
    """[C] int32, what ended it included."""
    logprobs: np.ndarray
    """[C] float32, nats, of the distribution that was sampled from."""
    stop_reason: StopReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopLogprobs:
    """The likeliest tokens at each place of a prompt, likeliest first; row 0 is of no prediction."""

    token_ids: np.ndarray
    """[N, K] int32; -1 in row 0."""
    logprobs: np.ndarray
    """[N, K] float32, nats; NaN in row 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleOutput:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """[N] float32, nats, NaN first; None where nobody asked."""
    topk_prompt_logprobs: TopLogprobs | None = None
