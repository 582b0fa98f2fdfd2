"""Values that the Tinker service and its backends exchange, and the errors that they raise.

Names of losses, of their inputs and of their settings are those of the wire (docs/tinker.md). What a backend
computes is said in relay's own types (`rl/types.py`).

Shape legend: N tokens of one datum or prompt, K targets or alternatives per token, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from rl.types import Completion, SamplingParams

Metadata: TypeAlias = dict[str, str]
CheckpointKind = Literal["training", "sampler"]


class TinkerError(Exception):
    """A request that failed; the text is meant for the client."""


class InvalidRequestError(TinkerError, ValueError):
    """A mistake of the caller: the same request never succeeds. The text names field, value and valid values."""


class NotFoundError(TinkerError, LookupError):
    """A session, model, sampler, request or checkpoint that does not exist or belongs to another key."""


class GoneError(TinkerError):
    """A session, model or result that existed and has ended."""


class BusyError(TinkerError):
    """Too much work is waiting: the same request may succeed later."""


class LimitReachedError(TinkerError):
    """One owner holds as many models, sessions or checkpoints as allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRASettings:
    """The parts of a base model that get adapters."""

    rank: int
    seed: int | None = None
    """Seed of the adapters' initial values; None draws one."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """Add an adapter to the output head; without effect on a head tied to the embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Settings of a model in training."""

    base_model: str
    lora: LoRASettings | None
    """Adapters; None trains all parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A model that a backend offers, with the bounds that requests are checked against."""

    name: str
    architecture: str
    """Name of the model family, such as "qwen3"."""
    max_context_length: int
    """Most tokens of a prompt with its completion."""
    vocab_size: int
    tokenizer_folder: str
    """Hugging Face folder that `get_tokenizer` opens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion unless the request says otherwise."""
    tie_embeddings: bool = True
    max_lora_rank: int = 128
    min_temperature: float = 1e-30
    """Lowest temperature above 0 that the sampler can divide logits by."""
    topk_prompt_logprobs: bool = True
    """True if the sampler can return the most likely tokens at each position of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datum:
    """One sequence of a `forward_backward`; entry i of each input belongs to the prediction after token i."""

    tokens: np.ndarray
    """[N] int32 input tokens."""
    loss_inputs: Mapping[str, np.ndarray]
    """[N] or, for cross_entropy, [N, K] arrays of float32 or int64; sparse ones are dense here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCall:
    """A loss by its name on the wire."""

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBackwardOutput:
    logprobs: tuple[np.ndarray, ...]
    """For each datum the [N] or [N, K] float32 logprobs of its targets, nats."""
    metrics: Mapping[str, float]
    """Metrics named `name:reduction`, with `loss:sum` among them."""

    @property
    def num_bytes(self) -> int:
        return sum(logprobs.nbytes for logprobs in self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRequest:
    """A checked request to a sampler."""

    prompt: np.ndarray
    """[N] int32 tokens."""
    sampling: SamplingParams
    """`max_tokens` fits the context and is 0 where the prompt fills it; `seed` is never None."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopLogprobs:
    """The most likely tokens at each place of a prompt, most likely first; row 0 predicts nothing."""

    token_ids: np.ndarray
    """[N, K] int32; -1 in row 0."""
    logprobs: np.ndarray
    """[N, K] float32, nats; NaN in row 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleOutput:
    completions: tuple[Completion, ...]
    prompt_logprobs: np.ndarray | None = None
    """[N] float32, nats, NaN first; None unless requested."""
    topk_prompt_logprobs: TopLogprobs | None = None

    @property
    def num_bytes(self) -> int:
        arrays = [array for one in self.completions for array in (one.token_ids, one.logprobs)]
        if self.prompt_logprobs is not None:
            arrays.append(self.prompt_logprobs)
        if (top := self.topk_prompt_logprobs) is not None:
            arrays += (top.token_ids, top.logprobs)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The result of work that failed after it was accepted."""

    error: str
    """Text for the client, without paths or other internals."""
    category: Literal["user", "server", "unknown"]
