"""A batched sampler with a key-value cache, in plain PyTorch on the trainer's model.

It serves the in-process backends and is the reference for the engine's logprobs. While it runs,
only the model's core attention is replaced. Forwards of a batch-invariant model are padded to whole
tiles of rows.

Shape legend: T packed tokens of a forward, P prompts, N requests, B of them still running, C tokens
of one chunk, E model width, H query heads, K key-value heads, D head size, V vocabulary, M tokens
of one prompt, k most likely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import pad_rows
from rl.models.decoder import Attention, Decoder
from rl.models.sampling import (
    End,
    check_sampling,
    draw,
    processed_logprobs,
    request_seeds,
    uniforms,
)
from rl.types import Completion, FinishReason, SamplingParams
from rl.utils.errors import RunError

T = TypeVar("T")
CHUNK_TOKENS = 512
"""Tokens of a prompt whose logits exist at once."""
DIVERGED = "the model's logprobs are NaN: weights or activations are not finite"


class DivergedWeightsError(RunError, ArithmeticError):
    """The weights give logprobs that are NaN, from which nothing can be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Interrupted(Generic[T]):
    """The part of a call's work that is left after an interruption."""

    resume: Callable[[], Awaitable[T | Interrupted[T]]]
    has_advanced: bool
    """False if nothing was drawn before the interruption."""


def generate(
    model: Decoder,
    prompts: Sequence[np.ndarray],
    *,
    sampling: SamplingParams,
    max_sequences: int = 256,
) -> list[list[Completion]]:
    """Return `sampling.num_samples` completions of each prompt ([M] int token ids), in order.

    With a seed, a prompt's completions depend only on the seed and the prompt, not on the rest of
    the call, up to the rounding of the kernels. A completion that fills the model's context ends as
    "length". At most `max_sequences` completions are decoded at once. Raises ValueError for an
    empty or too long prompt, or a setting out of range.
    """
    if sampling.stop_texts:
        raise ValueError(
            f"stop_texts={sampling.stop_texts}: must be empty here, because they need a tokenizer; "
            "give stop_token_ids"
        )
    requests = build_requests(
        prompts,
        sampling=sampling,
        context=model.config.rope.max_positions,
        ends=lambda tokens: tokens[-1] in sampling.stop_token_ids,
    )
    completions = complete(model, requests, sampling=sampling, max_sequences=max_sequences)
    return by_prompt(completions, sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompletionRequest:
    """One completion to draw. It does not depend on what is drawn with it."""

    prompt: np.ndarray
    """[M] int token ids."""
    max_tokens: int
    seed: int
    ends: End
    """Called after each token; true ends the completion as "stop"."""


def build_requests(
    prompts: Sequence[np.ndarray], *, sampling: SamplingParams, context: int, ends: End
) -> list[CompletionRequest]:
    """Return `sampling.num_samples` requests for each prompt, in order; raise ValueError as
    `generate`.

    `context` is the largest number of tokens of a prompt and its completion.
    """
    check_sampling(sampling)
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: must be 1 to {context - 1}")
    common = int(torch.randint(2**62, ()).item()) if sampling.seed is None else sampling.seed
    seeds = request_seeds(prompts, seed=common, num_samples=sampling.num_samples)
    return [
        CompletionRequest(
            prompt=prompt,
            max_tokens=min(sampling.max_tokens, context - len(prompt)),
            seed=seed,
            ends=ends,
        )
        for prompt, seeds_of_prompt in zip(prompts, seeds, strict=True)
        for seed in seeds_of_prompt
    ]


def by_prompt(
    completions: Sequence[Completion], *, sampling: SamplingParams
) -> list[list[Completion]]:
    """Return the completions of each prompt."""
    num_samples = sampling.num_samples
    return [list(completions[i : i + num_samples]) for i in range(0, len(completions), num_samples)]


def complete(
    model: Decoder,
    requests: Sequence[CompletionRequest],
    *,
    sampling: SamplingParams,
    policy_version: int = 0,
    max_sequences: int = 256,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """Return a completion for each request, with the temperature, top-k and top-p of `sampling`.

    Args:
        is_cancelled: called before each token; once it returns true, running completions end as
            "abort".
    """
    drawing = Drawing(requests, sampling=sampling, max_sequences=max_sequences)
    drawing.draw(model, is_cancelled)
    return drawing.completions(policy_version)


class Drawing:
    """Completions that are drawn with pauses, in which the model may be used otherwise."""

    def __init__(
        self,
        requests: Sequence[CompletionRequest],
        *,
        sampling: SamplingParams,
        max_sequences: int = 256,
    ) -> None:
        self._sampling = sampling
        self._batches = [
            _Batch(requests[first : first + max_sequences])
            for first in range(0, len(requests), max_sequences)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for batch in self._batches for tokens in batch.tokens)

    def draw(self, model: Decoder, pauses: Callable[[], bool]) -> bool:
        """Draw until all completions have ended or `pauses`, called before each token, is true;
        return the former.

        Raises DivergedWeightsError for logprobs that are NaN.
        """
        return all(batch.draw(model, self._sampling, pauses) for batch in self._batches)

    def completions(self, policy_version: int) -> list[Completion]:
        return [
            batch.build_completion(n, policy_version)
            for batch in self._batches
            for n in range(len(batch.requests))
        ]


class _Batch:
    """Completions that are decoded together."""

    def __init__(self, requests: Sequence[CompletionRequest]) -> None:
        self.requests = requests
        self.rows = list(range(len(requests)))
        """Completions that run."""
        self.caches: list[CachedAttention] = []
        """Keys and values of each layer so far."""
        self.num_cached = 0
        """Slots of the caches that are used."""
        self.slots: list[np.ndarray] = []
        """Slots of each running completion; none before the prompts are read."""
        self.last_tokens = torch.empty(0, dtype=torch.int64)
        """Last token of each running completion, which the caches lack."""
        self.num_drawn = 0
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.reasons: list[FinishReason] = ["abort"] * len(requests)
        """"abort" while a completion runs."""

    def build_completion(self, n: int, policy_version: int) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens[n], dtype=np.int32),
            logprobs=np.array(self.logprobs[n], dtype=np.float32),
            policy_versions=np.full(len(self.tokens[n]), policy_version, dtype=np.int32),
            finish_reason=self.reasons[n],
        )

    def append(self, n: int, token: int, logprob: float) -> None:
        self.tokens[n].append(token)
        self.logprobs[n].append(logprob)
        if self.requests[n].ends(self.tokens[n]):
            self.reasons[n] = "stop"
        elif len(self.tokens[n]) == self.requests[n].max_tokens:
            self.reasons[n] = "length"

    @torch.no_grad()
    def draw(self, model: Decoder, sampling: SamplingParams, pauses: Callable[[], bool]) -> bool:
        """See `Drawing.draw`."""
        if not self.rows:
            return True
        device = model.embed_tokens.weight.device
        longest = max(request.max_tokens for request in self.requests)
        uniforms_NC = torch.stack([uniforms(r.seed, longest) for r in self.requests]).to(device)
        with attach_caches(model, self.caches):
            while self.rows and not pauses():
                logits_BV = self._decode_next(model) if self.slots else self._prefill(model)
                logprobs_BV = processed_logprobs(logits_BV, sampling)
                if sampling.temperature == 0:
                    tokens_B = logprobs_BV.argmax(-1)
                else:
                    tokens_B = draw(logprobs_BV, uniforms_NC[self.rows, self.num_drawn])
                drawn = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).tolist()
                if any(map(math.isnan, drawn)):
                    raise DivergedWeightsError(DIVERGED)
                self.num_drawn += 1
                for row, token, logprob in zip(self.rows, tokens_B.tolist(), drawn, strict=True):
                    self.append(row, token, logprob)
                keep = [i for i, row in enumerate(self.rows) if self.reasons[row] == "abort"]
                self.rows = [self.rows[i] for i in keep]
                self.slots = [self.slots[i] for i in keep]
                self.last_tokens = tokens_B[keep]
        if not self.rows:
            self.caches.clear()
        return not self.rows

    def _decode_next(self, model: Decoder) -> Tensor:
        """Put the last tokens into the cache; return the logits after them, [B, V]."""
        tokens_B = self.last_tokens
        self.slots = [np.append(places, self.num_cached + n) for n, places in enumerate(self.slots)]
        self.num_cached += len(self.slots)
        positions_B = torch.tensor(
            [len(places) - 1 for places in self.slots], device=tokens_B.device
        )
        layout = SequenceLayout.of_single_queries(self.slots, device=tokens_B.device)
        return _compute_logits(model, tokens_B, positions_B, layout)

    def _prefill(self, model: Decoder) -> Tensor:
        """Fill the cache with each prompt once; return each request's logits, [N, V]."""
        groups = [
            list(group)
            for _, group in groupby(self.requests, key=lambda request: id(request.prompt))
        ]
        prompts, sizes = [group[0].prompt for group in groups], [len(group) for group in groups]
        lengths = [len(prompt) for prompt in prompts]
        device = model.embed_tokens.weight.device
        tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        layout = SequenceLayout.from_lengths(lengths, device=device)
        ends = np.cumsum(lengths)
        logits_PV = _compute_logits(
            model, tokens_T, positions_T, layout, rows=torch.from_numpy(ends - 1).to(device)
        )
        slots = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.slots = [
            places for places, size in zip(slots, sizes, strict=True) for _ in range(size)
        ]
        self.num_cached = int(ends[-1])
        return logits_PV.repeat_interleave(torch.tensor(sizes, device=device), dim=0)


def _compute_logits(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    layout: SequenceLayout,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the logits at these rows, by default at all."""
    rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    pad = partial(pad_rows, multiple=model.row_multiple)

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
        return F.linear(pad(hidden_TE[rows]), weight_VE)[: len(rows)]

    return model(pad(tokens), positions=pad(positions), sequences=layout, head=head)


class CachedAttention(nn.Module):
    """Core attention over the present tokens, or over single tokens and those of earlier
    forwards.
    """

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.kv = torch.empty(0)
        """Keys, then values of all tokens so far, [slots, 2K, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        """Return [T, H, D]; tokens beyond those of the layout are padding, and their results
        zeros.
        """
        num_tokens = layout.num_tokens
        kv = torch.cat((k, v), dim=1)[:num_tokens]
        self.kv = kv if layout.key_rows is None else torch.cat((self.kv, kv))
        out = self.core(q[:num_tokens], *self.kv.chunk(2, dim=1), layout)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - num_tokens))


@contextmanager
def attach_caches(model: Decoder, caches: list[CachedAttention]) -> Iterator[None]:
    """Replace the model's core attention by one that reads and fills a cache, and that permits
    padding.

    `caches` has those of the layers, or is empty and gets them.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [attention.core for attention in attentions]
    if not caches:
        caches += [CachedAttention(core) for core in cores]
    try:
        for attention, core, cache in zip(attentions, cores, caches, strict=True):
            cache.core = core  # that of a model which was made again meanwhile
            attention.core = cache
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptLogprobs:
    """Predictions of one prompt; entry m is about token m given the tokens before it."""

    logprobs: np.ndarray
    """[M] float32, nats, at temperature 1; NaN for the first token."""
    top_ids: np.ndarray
    """[M, k] int32, most likely first; -1 for the first token."""
    top_logprobs: np.ndarray
    """[M, k] float32, nats; NaN for the first token."""

    @property
    def num_bytes(self) -> int:
        return self.logprobs.nbytes + self.top_ids.nbytes + self.top_logprobs.nbytes


@torch.no_grad()
def prompt_logprobs(model: Decoder, prompt: np.ndarray, *, top_k: int = 0) -> PromptLogprobs:
    """Return the predictions of a prompt ([M] int token ids), with its `top_k` most likely tokens.

    With a batch-invariant model the logprobs equal those of the trainer and of `generate` bit for
    bit.
    """
    tokens_M = torch.from_numpy(prompt.astype(np.int64)).to(model.embed_tokens.weight.device)
    pad = partial(pad_rows, multiple=model.row_multiple)
    inputs_T, targets_T = pad(tokens_M), pad(tokens_M.roll(-1))
    positions_T = pad(torch.arange(len(prompt), device=tokens_M.device))
    lengths = [len(prompt), len(inputs_T) - len(prompt)]
    layout = SequenceLayout.from_lengths([n for n in lengths if n], device=tokens_M.device)

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> Any:
        chunks = []
        for hidden_CE, targets_C in zip(
            *(x.split(CHUNK_TOKENS) for x in (hidden_TE, targets_T)), strict=True
        ):
            logprobs_CV = F.linear(hidden_CE, weight_VE).float().log_softmax(-1)
            own_C = logprobs_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1)
            chunks.append((own_C, *logprobs_CV.topk(top_k, dim=-1)))
        return [torch.cat(values) for values in zip(*chunks, strict=True)]

    values = model(inputs_T, positions=positions_T, sequences=layout, head=head)
    # Entry m of the results is about token m + 1.
    own_M, top_Mk, ids_Mk = (x[: len(prompt)].roll(1, 0).cpu().numpy() for x in values)
    if np.isnan(own_M[1:]).any():
        raise DivergedWeightsError(DIVERGED)
    own_M[0], top_Mk[0], ids_Mk[0] = np.nan, np.nan, -1
    return PromptLogprobs(logprobs=own_M, top_ids=ids_Mk.astype(np.int32), top_logprobs=top_Mk)
