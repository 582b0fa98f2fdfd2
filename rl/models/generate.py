"""A batched sampler with a key-value cache, in plain PyTorch on our own model.

It is what the engine's logprobs are tested against, and what samples in a notebook where
there is no engine. The model is the trainer's; only its core attention is exchanged while
this runs.

Shape legend: T packed prompt tokens, P prompts, N sequences being decoded, B of them still
running, C tokens of one completion, L cached positions, E model width, H query heads,
K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import InvariantAttention
from rl.models.batch_invariant.rows import pad_rows
from rl.models.prompt_requests import End, PromptRequest, prompt_requests
from rl.models.qwen3.model import Attention, Qwen3, linear_head
from rl.models.sampling import check_sampling, draw, processed_logprobs, uniforms
from rl.types import Completion, FinishReason, SamplingParams


@torch.no_grad()
def generate(
    model: Qwen3,
    prompts: list[np.ndarray],
    *,
    sampling: SamplingParams,
    policy_version: int = 0,
    max_sequences: int = 256,
    is_cancelled: Callable[[], bool] = lambda: False,
    limits: Sequence[int] | None = None,
    seeds: Sequence[int | None] | None = None,
    ends: Sequence[End | None] | None = None,
) -> list[list[Completion]]:
    """Completions of each prompt ([T] int token ids), `sampling.num_samples` each, in order.

    With a seed, a prompt's completions depend on the seed and on that prompt alone, not on
    what else is in the call (up to the kernels' rounding). Where a prompt and `max_tokens`
    together pass the model's context, the completion ends there, as "length".

    Args:
        max_sequences: most completions decoded at once; bounds the cache.
        is_cancelled: asked before each token. Once it is true, completions end where they are, as "abort".
        limits: most tokens of each prompt's completions, in place of `sampling.max_tokens`, which is the most
            of all.
        seeds: of each prompt; then what is drawn depends on its seed, its tokens and the number of the
            completion alone, also where a prompt comes twice. None: as without.
        ends: for each prompt, asked after each token about all tokens of a completion; true ends it, as
            "stop".

    Raises:
        ValueError: a prompt that is empty or fills the context, or settings out of range, or not as many as
            prompts.
    """
    context = model.config.rope.max_positions
    check_sampling(sampling)
    if sampling.stop_texts:
        raise ValueError(f"sampling.stop_texts={sampling.stop_texts}: must be (), give `ends` instead")
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: must be 1 to {context - 1}")
    requests = prompt_requests(prompts, sampling, limits=limits, seeds=seeds, ends=ends)
    if max_sequences < 1:
        raise ValueError(f"max_sequences={max_sequences}: must be at least 1")
    completions: list[list[Completion]] = [[] for _ in prompts]
    for numbers, samples in _batches(len(prompts), sampling.num_samples, max_sequences):
        some = [replace(requests[i], seeds=requests[i].seeds[samples]) for i in numbers]
        batch = _Batch(some, num_samples=len(some[0].seeds), context=context)
        _decode(model, batch, sampling, is_cancelled)
        for i, drawn in zip(numbers, batch.completions(policy_version), strict=True):
            completions[i] += drawn
    return completions


def _batches(num_prompts: int, num_samples: int, max_sequences: int) -> Iterator[tuple[range, slice]]:
    """Which prompts, and which samples of each, are decoded at once: of whole prompts, or part of one."""
    group = max(1, max_sequences // num_samples)
    for start in range(0, num_prompts, group):
        for first in range(0, num_samples, max_sequences):
            yield range(start, min(start + group, num_prompts)), slice(first, first + max_sequences)


class _Batch:
    """Prompts with their sequences: row n is sample n % num_samples of prompt n // num_samples."""

    def __init__(self, requests: Sequence[PromptRequest], *, num_samples: int, context: int) -> None:
        self.prompts = [request.prompt for request in requests]
        self.num_samples = num_samples
        self.ends = [request.end for request in requests]
        self.prompt_lengths = np.repeat([len(prompt) for prompt in self.prompts], num_samples)
        limits = np.repeat([request.limit for request in requests], num_samples)
        self.limits = np.minimum(limits, context - self.prompt_lengths)
        """[N] most tokens of each sequence."""
        longest = int(self.limits.max())
        self.uniforms = torch.stack(
            [uniforms(seed, longest) for request in requests for seed in request.seeds]
        )
        """[N, longest] float64, what each draw is decided by."""
        self.tokens: list[list[int]] = [[] for _ in self.prompt_lengths]
        self.logprobs: list[list[float]] = [[] for _ in self.prompt_lengths]
        self.finish_reasons: list[FinishReason | None] = [None] * len(self.tokens)

    def append(self, row: int, token: int, logprob: float, *, stop: tuple[int, ...]) -> None:
        self.tokens[row].append(token)
        self.logprobs[row].append(logprob)
        end = self.ends[row // self.num_samples]
        if token in stop or (end is not None and end(self.tokens[row])):
            self.finish_reasons[row] = "stop"
        elif len(self.tokens[row]) == self.limits[row]:
            self.finish_reasons[row] = "length"

    def completions(self, policy_version: int) -> list[list[Completion]]:
        made = [
            Completion(
                token_ids=np.array(tokens, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                policy_versions=np.full(len(tokens), policy_version, dtype=np.int32),
                finish_reason=reason or "abort",
            )
            for tokens, logprobs, reason in zip(self.tokens, self.logprobs, self.finish_reasons, strict=True)
        ]
        return [made[i : i + self.num_samples] for i in range(0, len(made), self.num_samples)]


def _decode(model: Qwen3, batch: _Batch, sampling: SamplingParams, is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        return
    device = model.embed_tokens.weight.device
    uniforms_NC = batch.uniforms.to(device)
    with cached_attention(model) as cache:
        logits_BV = _prefill(model, cache, batch).repeat_interleave(batch.num_samples, dim=0)
        cache.repeat(batch.num_samples)
        rows = list(range(len(batch.tokens)))
        for step in range(int(batch.limits.max())):
            logprobs_BV = processed_logprobs(logits_BV, sampling)
            if sampling.temperature == 0:
                tokens_B = logprobs_BV.argmax(-1)
            else:
                tokens_B = draw(logprobs_BV, uniforms_NC[rows, step])
            drawn = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).tolist()
            for row, token, logprob in zip(rows, tokens_B.tolist(), drawn, strict=True):
                batch.append(row, token, logprob, stop=sampling.stop_token_ids)
            keep = [i for i, row in enumerate(rows) if batch.finish_reasons[row] is None]
            if not keep or is_cancelled():
                return
            rows = [rows[i] for i in keep]
            cache.step(rows, positions=(batch.prompt_lengths[rows] + step).tolist())
            logits_BV = _forward(model, cache, tokens_B[keep], head=linear_head)[: len(keep)]


def _prefill(model: Qwen3, cache: KVCache, batch: _Batch) -> Tensor:
    """Logits [P, V] of the token after each prompt; fills the cache, one row a prompt."""
    device = model.embed_tokens.weight.device
    lengths = [len(p) for p in batch.prompts]
    layout = SequenceLayout.from_lengths(lengths, device=device)
    tokens_T = torch.from_numpy(np.concatenate(batch.prompts).astype(np.int64)).to(device)
    cache.prefill(lengths, device=device)
    last_P = layout.offsets[1:].long() - 1

    def last_logits(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
        hidden_PE = hidden_TE[last_P]
        return F.linear(pad_rows(hidden_PE) if cache.pads_rows else hidden_PE, weight_VE)

    return _forward(model, cache, tokens_T, head=last_logits, sequences=layout)[: len(lengths)]


def _forward(
    model: Qwen3,
    cache: KVCache,
    tokens: Tensor,
    *,
    head: Callable[[Tensor, Tensor], Tensor],
    sequences: SequenceLayout | None = None,
) -> Tensor:
    """Logits of the cache's tokens, and after them of the tile's padding, if it pads."""
    positions = cache.positions
    if cache.pads_rows:
        tokens, positions = pad_rows(tokens), pad_rows(positions)
    return model(tokens, positions=positions, sequences=sequences, head=head)


@dataclass(kw_only=True, slots=True)
class KVCache:
    """What the layers' caches share: which rows this forward is about, and at which positions."""

    layers: list[CachedAttention] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[tokens of this forward] int64, cache row of each."""
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[tokens of this forward] int64."""
    length: int = 0
    """Positions in use, of the longest row."""
    pads_rows: bool = False
    """Whether the model is batch-invariant: its tokens come in whole tiles."""

    def prefill(self, lengths: list[int], *, device: torch.device) -> None:
        """The next forward is a packed batch of whole prompts; prompt p fills row p."""
        self.rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self.length = max(lengths)

    def step(self, rows: list[int], *, positions: list[int]) -> None:
        """The next forward has one token for each of `rows`."""
        device = self.rows.device
        self.rows = torch.tensor(rows, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.length = max(positions) + 1

    def repeat(self, times: int) -> None:
        """Each row becomes `times` rows: the samples of one prompt."""
        for layer in self.layers:
            layer.k_NKLD = layer.k_NKLD.repeat_interleave(times, dim=0)
            layer.v_NKLD = layer.v_NKLD.repeat_interleave(times, dim=0)


class CachedAttention(nn.Module):
    """Core attention that remembers keys and values: packed over prompts, then one token a row."""

    def __init__(self, cache: KVCache, core: nn.Module) -> None:
        """`core` is the trainer's attention, packed over sequences."""
        super().__init__()
        self.cache = cache
        self.core = core
        self.k_NKLD = torch.empty(0)
        self.v_NKLD = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceLayout | None) -> Tensor:
        """[tokens, H, D], [tokens, K, D], [tokens, K, D] -> [tokens, H, D]."""
        num_tokens, num_padding = len(self.cache.rows), len(q) - len(self.cache.rows)
        q, k, v = q[:num_tokens], k[:num_tokens], v[:num_tokens]
        self._remember(k, v)
        if sequences is not None:
            out = self.core(q, k, v, sequences)
        elif self.cache.pads_rows:
            out = self._attend_invariantly(q)
        else:
            out = self._attend(q)
        return F.pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out

    def _attend(self, q: Tensor) -> Tensor:
        cache = self.cache
        past = slice(0, cache.length)
        k_BKLD, v_BKLD = self.k_NKLD[cache.rows, :, past], self.v_NKLD[cache.rows, :, past]
        seen_BL = torch.arange(cache.length, device=q.device) <= cache.positions.unsqueeze(1)
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), k_BKLD, v_BKLD, attn_mask=seen_BL[:, None, None], enable_gqa=True
        )
        return out.squeeze(2)

    def _attend_invariantly(self, q: Tensor) -> Tensor:
        from rl.models.batch_invariant.functions import attend, offsets

        cache = self.cache
        lengths = (cache.positions + 1).tolist()
        rows = list(zip(cache.rows.tolist(), lengths, strict=True))
        k_NKD, v_NKD = (
            torch.cat([x[row, :, :length].transpose(0, 1) for row, length in rows])
            for x in (self.k_NKLD, self.v_NKLD)
        )
        return attend(q, k_NKD, v_NKD, offsets([1] * len(rows)), offsets(lengths))

    def _remember(self, k: Tensor, v: Tensor) -> None:
        cache = self.cache
        if self.k_NKLD.numel() == 0:
            size = (int(cache.rows.max()) + 1, k.size(1), cache.length, k.size(2))
            self.k_NKLD, self.v_NKLD = k.new_zeros(size), v.new_zeros(size)
        capacity = self.k_NKLD.size(2)
        if cache.length > capacity:
            # Half as much again, so that growing costs little in total.
            more = (0, 0, 0, max(cache.length - capacity, capacity // 2))
            self.k_NKLD, self.v_NKLD = F.pad(self.k_NKLD, more), F.pad(self.v_NKLD, more)
        self.k_NKLD[cache.rows, :, cache.positions] = k
        self.v_NKLD[cache.rows, :, cache.positions] = v


@contextmanager
def cached_attention(model: Qwen3) -> Iterator[KVCache]:
    """Within it, the model's core attention reads and fills a cache; afterwards it is as before."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [attention.core for attention in attentions]
    cache = KVCache(pads_rows=isinstance(cores[0], InvariantAttention))
    try:
        for attention, core in zip(attentions, cores, strict=True):
            cache.layers.append(CachedAttention(cache, core))
            attention.core = cache.layers[-1]
        yield cache
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
