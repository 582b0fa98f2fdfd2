"""A batched sampler with a key-value cache, in plain PyTorch on the trainer's model.

It serves the in-process backends and is the reference for the engine's logprobs. While it runs, only the model's
core attention is replaced.

Shape legend: T packed prompt tokens, P prompts, N sequences being decoded, B of them still running, C tokens of
one completion or of one chunk, E model width, H query heads, K key-value heads, D head size, V vocabulary,
M tokens of one prompt, k most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.attention import Segments, SequenceLayout, on_device
from rl.models.batch_invariant.model import InvariantAttention, pad_rows
from rl.models.decoder import Attention, Decoder, linear_head
from rl.models.sampling import End, check_sampling, draw, processed_logprobs, request_seeds, uniforms
from rl.types import Completion, FinishReason, SamplingParams

CHUNK_TOKENS = 512
"""Tokens of a prompt whose logits exist at once."""


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[np.ndarray],
    *,
    sampling: SamplingParams,
    policy_version: int = 0,
    max_sequences: int = 256,
    is_cancelled: Callable[[], bool] = lambda: False,
    limits: Sequence[int] | None = None,
    seeds: Sequence[int | None] | None = None,
    ends: Sequence[End | None] | None = None,
) -> list[list[Completion]]:
    """Return `sampling.num_samples` completions of each prompt ([M] int token ids), in order.

    With a seed, a prompt's completions depend only on the seed and the prompt, not on the rest of the call, up to
    the rounding of the kernels. A completion that fills the model's context ends as "length".

    Args:
        max_sequences: largest number of completions decoded at once; bounds the cache.
        is_cancelled: called before each token; once it returns true, running completions end as "abort".
        limits: largest number of tokens for each prompt's completions; None for `sampling.max_tokens`.
        seeds: seed of each prompt. Completions then depend only on that seed, the prompt and the number of the
            sample, also if a prompt occurs twice. None stands for `sampling.seed`.
        ends: for each prompt a condition, called with a completion's tokens after each token; true ends the
            completion as "stop".

    Raises:
        ValueError: if a prompt is empty or fills the context, a setting is out of range, or a sequence has
            another length than `prompts`.
    """
    context, num_samples = model.config.rope.max_positions, sampling.num_samples
    check_sampling(sampling)
    if sampling.stop_texts:
        raise ValueError(f"sampling.stop_texts={sampling.stop_texts}: must be (), pass `ends` instead")
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: must be 1 to {context - 1}")
    limits = [sampling.max_tokens] * len(prompts) if limits is None else limits
    ends = [None] * len(prompts) if ends is None else ends
    drawn = _sample_seeds(prompts, sampling, [None] * len(prompts) if seeds is None else seeds)
    sequences = [
        _Sequence(prompt=prompt, limit=min(limit, context - len(prompt)), seed=seed, end=end)
        for prompt, limit, seeds_of, end in zip(prompts, limits, drawn, ends, strict=True)
        for seed in seeds_of
    ]
    for first in range(0, len(sequences), max_sequences):
        _decode(model, sequences[first : first + max_sequences], sampling, is_cancelled)
    completions = [sequence.completion(policy_version) for sequence in sequences]
    return [completions[i : i + num_samples] for i in range(0, len(completions), num_samples)]


def _sample_seeds(
    prompts: Sequence[np.ndarray], sampling: SamplingParams, own: Sequence[int | None]
) -> list[list[int]]:
    """Return the seed of each sample of each prompt; prompts without their own share `sampling.seed`."""
    common = int(torch.randint(2**62, ()).item()) if None in own and sampling.seed is None else sampling.seed
    others = [prompt for prompt, seed in zip(prompts, own, strict=True) if seed is None]
    shared = iter(request_seeds(others, seed=common or 0, num_samples=sampling.num_samples))
    return [
        next(shared)
        if seed is None
        else request_seeds([prompt], seed=seed, num_samples=sampling.num_samples)[0]
        for prompt, seed in zip(prompts, own, strict=True)
    ]


@dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    """A completion being decoded."""

    prompt: np.ndarray
    limit: int
    """Largest number of tokens."""
    seed: int
    end: End | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    """"abort" while it runs."""

    def append(self, token: int, logprob: float, *, stop: tuple[int, ...]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop or (self.end is not None and self.end(self.tokens)):
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def completion(self, policy_version: int) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            policy_versions=np.full(len(self.tokens), policy_version, dtype=np.int32),
            finish_reason=self.finish_reason,
        )


def _decode(
    model: Decoder, sequences: Sequence[_Sequence], sampling: SamplingParams, is_cancelled: Callable[[], bool]
) -> None:
    if is_cancelled():
        return
    device = model.embed_tokens.weight.device
    prompts = {id(s.prompt): s.prompt for s in sequences}
    numbers = {key: number for number, key in enumerate(prompts)}
    prompt_of = [numbers[id(s.prompt)] for s in sequences]
    longest = max(s.limit for s in sequences)
    uniforms_NC = torch.stack([uniforms(s.seed, longest) for s in sequences]).to(device)
    with cached_attention(model) as cache:
        logits_BV = _prefill(model, cache, list(prompts.values()))[prompt_of]
        cache.continue_rows(prompt_of)
        rows = list(range(len(sequences)))
        for step in range(longest):
            logprobs_BV = processed_logprobs(logits_BV, sampling)
            if sampling.temperature == 0:
                tokens_B = logprobs_BV.argmax(-1)
            else:
                tokens_B = draw(logprobs_BV, uniforms_NC[rows, step])
            drawn = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).tolist()
            for row, token, logprob in zip(rows, tokens_B.tolist(), drawn, strict=True):
                sequences[row].append(token, logprob, stop=sampling.stop_token_ids)
            keep = [i for i, row in enumerate(rows) if sequences[row].finish_reason == "abort"]
            if not keep or is_cancelled():
                return
            rows = [rows[i] for i in keep]
            cache.continue_rows(keep)
            cache.place_next(device)
            logits_BV = _forward(model, cache, tokens_B[keep], head=linear_head)[: len(keep)]


def _prefill(model: Decoder, cache: KVCache, prompts: Sequence[np.ndarray]) -> Tensor:
    """Fill the cache, one row per prompt, and return the logits of the token after each prompt, [P, V]."""
    device = model.embed_tokens.weight.device
    lengths = [len(prompt) for prompt in prompts]
    layout = SequenceLayout.from_lengths(lengths, device=device)
    tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
    cache.place_prompts(lengths, device)
    last_P = layout.offsets[1:].long() - 1

    def last_logits(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
        hidden_PE = hidden_TE[last_P]
        return F.linear(pad_rows(hidden_PE) if cache.pads_rows else hidden_PE, weight_VE)

    return _forward(model, cache, tokens_T, head=last_logits, sequences=layout)[: len(lengths)]


def _forward(
    model: Decoder,
    cache: KVCache,
    tokens: Tensor,
    *,
    head: Callable[[Tensor, Tensor], Tensor],
    sequences: SequenceLayout | None = None,
) -> Tensor:
    """Return the logits of the cache's tokens, followed by those of padding rows if the cache pads."""
    positions = cache.positions
    if cache.pads_rows:
        tokens, positions = pad_rows(tokens), pad_rows(positions)
    return model(tokens, positions=positions, sequences=sequences, head=head)


class KVCache:
    """Places of the tokens in the layers' caches, which grow by the tokens of each forward."""

    positions: Tensor
    """[tokens of this forward] int64."""
    segments: Segments
    """Keys that each token of this forward sees, if it continues a row."""

    def __init__(self, *, pads_rows: bool) -> None:
        """`pads_rows`: pad tokens to whole tiles, as a batch-invariant model needs."""
        self.pads_rows = pads_rows
        self._num_cached = 0
        self._slots: list[np.ndarray] = []
        """Slots of the tokens of each row, in the order of their positions."""

    def place_prompts(self, lengths: Sequence[int], device: torch.device) -> None:
        """Prepare the first forward: whole prompts, one row for each."""
        ends = np.cumsum(lengths)
        self._num_cached = int(ends[-1])
        self._slots = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)

    def continue_rows(self, rows: Sequence[int]) -> None:
        """Let row n be the row `rows[n]` from now on; a row may be continued several times."""
        self._slots = [self._slots[row] for row in rows]

    def place_next(self, device: torch.device) -> None:
        """Prepare a forward of one more token of each row."""
        self.positions = torch.tensor([len(slots) for slots in self._slots], device=device)
        self._slots = [np.append(slots, self._num_cached + i) for i, slots in enumerate(self._slots)]
        self._num_cached += len(self._slots)
        self.segments = on_device(Segments.of_single_queries(self._slots), device)


class CachedAttention(nn.Module):
    """Core attention with a cache: packed over prompts first, then one token per row."""

    def __init__(self, cache: KVCache, core: nn.Module) -> None:
        super().__init__()
        self.cache = cache
        self.core = core
        self.kv = torch.empty(0)
        """Keys, then values of all tokens so far, [slots, 2K, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceLayout | None) -> Tensor:
        """Attend from [tokens, H, D] to the cached keys and values; return [tokens, H, D]."""
        num_tokens = len(self.cache.positions)
        num_padding = len(q) - num_tokens
        q, k, v = q[:num_tokens], k[:num_tokens], v[:num_tokens]
        if sequences is not None:
            self.kv = torch.cat((k, v), dim=1)
            out = self.core(q, k, v, sequences)
        else:
            self.kv = torch.cat((self.kv, torch.cat((k, v), dim=1)))
            out = self.core(q, *self.kv.chunk(2, dim=1), self.cache.segments)
        return F.pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out


@contextmanager
def cached_attention(model: Decoder) -> Iterator[KVCache]:
    """Replace the model's core attention by one that reads and fills a cache."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [attention.core for attention in attentions]
    cache = KVCache(pads_rows=isinstance(cores[0], InvariantAttention))
    try:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = CachedAttention(cache, core)
        yield cache
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


@torch.no_grad()
def prompt_logprobs(model: Decoder, prompt: np.ndarray, *, top_k: int = 0) -> PromptLogprobs:
    """Return the predictions of a prompt ([M] int token ids), with its `top_k` most likely tokens.

    With a batch-invariant model the logprobs equal those of the trainer and of `generate` bit for bit.
    """
    num_tokens = len(prompt) - 1
    logprobs_M = np.full(len(prompt), np.nan, dtype=np.float32)
    ids_Mk = np.full((len(prompt), top_k), -1, dtype=np.int32)
    top_Mk = np.full((len(prompt), top_k), np.nan, dtype=np.float32)

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> None:
        for first in range(0, num_tokens, CHUNK_TOKENS):
            chunk = slice(first, first + CHUNK_TOKENS)
            logprobs_CV = F.linear(hidden_TE[chunk], weight_VE).float().log_softmax(-1)[: num_tokens - first]
            targets_C1 = tokens_M[1:][chunk].unsqueeze(1)
            top_Ck, ids_Ck = logprobs_CV.topk(top_k, dim=-1)
            for values_M, values_C in (
                (logprobs_M, logprobs_CV.gather(1, targets_C1).squeeze(1)),
                (ids_Mk, ids_Ck),
                (top_Mk, top_Ck),
            ):
                values_M[1:][chunk] = values_C.cpu().numpy()

    if num_tokens:
        tokens_M = torch.from_numpy(prompt.astype(np.int64)).to(model.embed_tokens.weight.device)
        inputs_T = pad_rows(tokens_M[:-1])
        # Padding to whole tiles of rows is a sequence of its own.
        lengths = [num_tokens, *([padding] if (padding := len(inputs_T) - num_tokens) else [])]
        positions_T = torch.cat([torch.arange(n) for n in lengths]).to(inputs_T.device)
        layout = SequenceLayout.from_lengths(lengths, device=inputs_T.device)
        model(inputs_T, positions=positions_T, sequences=layout, head=head)
    return PromptLogprobs(logprobs=logprobs_M, top_ids=ids_Mk, top_logprobs=top_Mk)
