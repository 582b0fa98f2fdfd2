"""Vocabulary of the Tinker service and its backends: values, errors, limits, and parameters of
calls.

Ids and paths:

    session      <process>-<random>
    model        <session>:train:<model_seq_id>
    sampler      <session>:sample:<sampling_session_seq_id>
    request      <model or sampler>:<seq_id>
    checkpoint   tinker://<model>/weights/<name>, tinker://<model>/sampler_weights/<name>

Shape legend: N tokens of one datum or prompt, K targets per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import psutil
import pydantic
from fastapi import Depends, Path, Query, Request
from tinker import types as wire

from rl.config.tree import check_bounds
from rl.models.generate import PromptLogprobs
from rl.types import Completion, SamplingParams
from rl.utils.printing import truncate

Metadata: TypeAlias = dict[str, str]

MAX_METADATA_LENGTH = 2**16
"""Characters of all names and values of `user_metadata`."""
NOT_SAVED = "nothing was saved, and earlier checkpoints are unchanged"
"""What a client is told of a save that failed."""


class TinkerError(Exception):
    """A request that failed; the text is meant for the client.

    The official client repeats a call that got 408, 409, 429 or 5xx for five minutes, so these
    statuses are kept for calls that may succeed later.
    """

    status: ClassVar[int]

    def __init__(self, text: str) -> None:
        super().__init__(truncate(text))


class InvalidRequestError(TinkerError, ValueError):
    """A mistake of the caller: the same request never succeeds. The text names field, value and
    valid values.
    """

    status = 400


class NotFoundError(TinkerError, LookupError):
    """A session, model, sampler, request or checkpoint that does not exist or belongs to another
    key.
    """

    status = 404


class GoneError(TinkerError):
    """A session, model or result that existed and has ended."""

    status = 410


class BusyError(TinkerError):
    """Too much work is waiting: the same request may succeed later."""

    status = 429


class LimitReachedError(TinkerError):
    """One owner has as many sessions or models as allowed, or the backend has no room for more
    weights.
    """

    status = 403


class UnsavedError(TinkerError):
    """A checkpoint or record that the server's disk has refused, such as a full one; earlier ones
    are unchanged.
    """

    status = 507

    def __init__(self, reason: str, *, what: str = NOT_SAVED) -> None:
        """Take the system's reason, without a path, and what did not happen."""
        text = f"{what}: the server's disk has refused it ({reason})"
        if what == NOT_SAVED:
            text += (
                ". When there is room, such as after checkpoints were deleted, the same "
                "request may succeed"
            )
        super().__init__(text)


# Values


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Settings that a model is created with, and that its checkpoints must have."""

    base_model: str
    lora: wire.LoraConfig | None
    """Adapters; None trains all parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerMark:
    """Place in a model's ledger: after one of its optimizer steps."""

    model_id: str
    step: int
    """Optimizer steps of the model; 0 before the first one."""
    digest: str
    """Digest of the step's file; empty before the first one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelInfo:
    """A model that a backend offers, with the bounds that requests are checked against."""

    name: str
    aliases: tuple[str, ...] = ()
    """Further names that clients may ask for it by."""
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
    min_lora_rank: int = 0
    """Lowest rank of adapters; 0 permits training of all parameters."""
    max_lora_rank: int = 128
    num_parameters: int = 0
    num_parameters_per_rank: int = 0
    """Parameters of adapters of rank 1 on all layers."""
    min_temperature: float = 1e-30
    """Lowest temperature above 0 that the sampler can divide logits by."""
    topk_prompt_logprobs: bool = True
    """True if the sampler can return the most likely tokens at each position of a prompt."""

    def resolve_alias(self, name: str | None) -> str | None:
        """Return the model's own name for an alias of it, and any other name as it is."""
        return self.name if name in self.aliases else name

    def count_trained(self, lora: wire.LoraConfig | None) -> int:
        """Return the most parameters that a model of these settings trains."""
        return self.num_parameters if lora is None else lora.rank * self.num_parameters_per_rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datum:
    """One sequence of a `forward_backward`; entry i of each input belongs to the prediction after
    token i.
    """

    tokens: np.ndarray
    """[N] int32."""
    loss_inputs: Mapping[str, np.ndarray]
    """[N] or, for cross_entropy, [N, K] arrays of float32 or int64; sparse ones are dense here."""


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
class SampleOutput:
    """Answer to a `SampleRequest`."""

    completions: Sequence[Completion]
    of_prompt: PromptLogprobs | None
    """Logprobs of the prompt, if requested."""

    @property
    def num_bytes(self) -> int:
        of_completions = sum(one.token_ids.nbytes + one.logprobs.nbytes for one in self.completions)
        return of_completions + (0 if self.of_prompt is None else self.of_prompt.num_bytes)


def check_base(base: BaseModelInfo, name: str | None) -> None:
    """Raise InvalidRequestError unless the name is that of the server's base model."""
    if name == base.name:
        return
    valid = " or ".join(map(repr, (base.name, *base.aliases)))
    hint = f"; a server started with --alias {name:.100} takes it too" if name else ""
    raise InvalidRequestError(f"base_model={name!r:.100}: must be {valid}{hint}")


# Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the work and the state of API keys. A refusal names the limit that it met."""

    models: int = 16
    """Models of one key in training at once."""
    samplers: int = 8
    """Snapshots and saved weights of one key open to sample from. The next one closes the least
    recently used one: a snapshot is then gone, saved weights open again with their next sample."""
    all_state_bytes: int | None = None
    """Estimated bytes of trained weights, gradients, optimizer state and snapshots of all keys;
    None: half of this machine's memory. Over actors, snapshots of whole models have a limit of
    their own (`weights.keep_versions`)."""
    all_held_bytes: int = 8 * 2**30
    """Bytes of the decoded requests of all keys without a result, at least 512 KiB each and 4 KiB a
    sample; and as many of results, of which the oldest go first. A key that has less than its share
    is not refused.
    """
    body_bytes: int = 64 * 2**20
    """Bytes of the body of a `forward_backward`."""
    chunk_data: int = 1024
    """Data per request that the client cuts larger batches into."""
    session_timeout_s: float | None = None
    """Silence after which a session ends; None: only when the client finishes it."""
    gap_timeout_s: float = 300.0
    """Wait for a model's missing earlier request; clients retry a request for five minutes."""
    result_kept_s: float = 900.0
    """Time a result can be retrieved."""
    poll_s: float = 25.0
    """Longest wait for a result in one request; the client gives up on a request after 45 s."""

    def __post_init__(self) -> None:
        check_bounds(self, *(field.name for field in fields(self)), above=0)
        check_bounds(self, "poll_s", at_most=40)
        # Two bodies have to fit into those of all keys together (auth.py).
        check_bounds(self, "body_bytes", at_most=2**29)

    @property
    def most_state_bytes(self) -> int:
        """`all_state_bytes` with its default."""
        return self.all_state_bytes or psutil.virtual_memory().total // 2


# Parameters of calls

SESSION = r"[0-9a-f]{8}-[0-9a-f]{16}"
MAX_SEQ_ID = 2**63 - 1
MAX_FLOAT = 1e30
"""Largest setting of a loss or an optimizer: products with it are finite in float32."""
BELOW_1 = math.nextafter(1.0, 0.0)
MAX_TTL_S = 10 * 365 * 24 * 3600


def _get_owner(request: Request) -> str:
    owner: str = request.state.owner
    return owner


Owner = Annotated[str, Depends(_get_owner)]
"""Owner of the call's key, whom the guard has found (auth.py)."""
Id = Annotated[str, Path(min_length=1, max_length=512)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class Future(pydantic.BaseModel):
    """An accepted request."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


def check_seq_id(name: str, value: int | None, *, first: int) -> int:
    """Return a whole number from `first`; raise InvalidRequestError, which calls it `name`."""
    if value is None or not first <= value <= MAX_SEQ_ID:
        raise InvalidRequestError(
            f"{name}={value!r:.100}: must be a whole number from {first} to {MAX_SEQ_ID}"
        )
    return value


def check_range(name: str, value: float | None, lowest: float, highest: float) -> None:
    """Raise InvalidRequestError unless the value is None or within the bounds, which NaN never
    is.
    """
    if value is not None and not lowest <= value <= highest:
        valid = f"{lowest} to {highest}"
        if highest == BELOW_1:
            valid = f"at least {lowest:g} and below 1"
        elif highest == math.inf:
            valid = f"a finite number of at least {lowest:g}"
        raise InvalidRequestError(f"{name}={value!r:.100}: must be {valid}")


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise InvalidRequestError unless the time to live is None or at most ten years."""
    check_range("ttl_seconds", ttl_seconds, 1, MAX_TTL_S)


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raise InvalidRequestError unless the values are texts that an answer can hold, and not too
    long.
    """
    metadata = metadata or {}
    length = sum(len(key) + len(str(value)) for key, value in metadata.items())
    if length > MAX_METADATA_LENGTH:
        raise InvalidRequestError(
            f"user_metadata: has {length} characters, must be at most {MAX_METADATA_LENGTH}"
        )
    for key, value in metadata.items():
        # Surrogates, which JSON can carry, cannot be encoded in an answer.
        try:
            (key + value).encode()
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                f"user_metadata[{key!a:.100}]: {value!a:.100}, must be a text"
            ) from None
