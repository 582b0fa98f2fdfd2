"""A batched sampler with a key-value cache, in plain PyTorch on the trainer's model.

It serves the in-process backends and is the reference for the engine's logprobs. While it runs,
only the model's core attention is replaced. Completions of one batch may have different adapters of
the model's bank. Forwards of a batch-invariant model are padded to whole tiles of rows.

Shape legend: T packed tokens of a forward, P prompts, N requests, B of them still running, C tokens
of one chunk, E model width, H query heads, K key-value heads, D head size, V vocabulary, M tokens
of one prompt, k most likely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.batch_invariant.model import pad_rows
from rl.models.decoder import Attention, Decoder
from rl.models.layers.attention import SequenceLayout
from rl.models.low_rank.types import HEAD, NONE
from rl.models.sampling import (
    End,
    check_sampling,
    draw,
    draw_uniforms,
    process_logits,
    request_seeds,
)
from rl.types import Completion, FinishReason, SamplingParams
from rl.utils.errors import RunError

CHUNK_TOKENS = 512
"""Tokens of a prompt whose logits exist at once."""
DIVERGED = "the model's logprobs are NaN: weights or activations are not finite"


class DivergedWeightsError(RunError, ArithmeticError):
    """The weights give logprobs that are NaN, from which nothing can be drawn."""


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

    Example:
        Two samples of one prompt, from a model with fresh weights:

        >>> model = model_spec("qwen3", "tiny").model.build()
        >>> model.init_weights(seed=0)
        >>> sampling = SamplingParams(max_tokens=3, num_samples=2, seed=1)
        >>> [completions] = generate(model, [np.array([5, 7, 9])], sampling=sampling)
        >>> [completion.token_ids.tolist() for completion in completions]
        [[197, 262, 178], [47, 127, 148]]
        >>> completions[0].finish_reason
        'length'
    """
    # Refused rather than ignored: the completion would go on after the text.
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
    return group_by_prompt(completions, sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompletionRequest:
    """One completion to draw. It does not depend on what is drawn with it."""

    prompt: np.ndarray
    """[M] int token ids."""
    max_tokens: int
    seed: int
    ends: End
    """Called after each token; true ends the completion as "stop"."""
    adapter: int = NONE
    """Version in the model's bank."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Called before each token; true ends the completion as "abort"."""


def build_requests(
    prompts: Sequence[np.ndarray], *, sampling: SamplingParams, context: int, ends: End
) -> list[CompletionRequest]:
    """Return `sampling.num_samples` requests for each prompt, in order.

    Raises ValueError as `generate`.

    Args:
        context: largest number of tokens of a prompt and its completion.
    """
    check_sampling(sampling)
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: must be 1 to {context - 1}")
    # Without a seed a common number is drawn, from which all requests derive theirs.
    common = int(torch.randint(2**62, ()).item()) if sampling.seed is None else sampling.seed
    seeds = request_seeds(
        prompts,
        seed=common,
        num_samples=sampling.num_samples,
        first_sample=sampling.first_sample,
    )
    requests: list[CompletionRequest] = []
    for prompt, seeds_of_prompt in zip(prompts, seeds, strict=True):
        max_tokens = min(sampling.max_tokens, context - len(prompt))
        for seed in seeds_of_prompt:
            request = CompletionRequest(prompt=prompt, max_tokens=max_tokens, seed=seed, ends=ends)
            requests.append(request)
    return requests


def group_by_prompt(
    completions: Sequence[Completion], *, sampling: SamplingParams
) -> list[list[Completion]]:
    """Return the completions of each prompt, of which `num_samples` follow each other."""
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
    return drawing.collect_completions(policy_version)


class Drawing:
    """Completions that are drawn with pauses, in which the model may be used otherwise."""

    def __init__(
        self,
        requests: Sequence[CompletionRequest],
        *,
        sampling: SamplingParams,
        max_sequences: int = 256,
    ) -> None:
        self.adapters = {request.adapter for request in requests}
        """Versions in the model's bank, NONE among them."""
        self._sampling = sampling
        self._num_requests, self._max_sequences = len(requests), max_sequences
        self._batches: list[_Batch] = []
        for first in range(0, len(requests), max_sequences):
            self._batches.append(_Batch(requests[first : first + max_sequences]))

    def draw(self, model: Decoder, pauses: Callable[[], bool]) -> bool:
        """Draw until all completions have ended or `pauses`, called before each token, is true.

        Returns True if all have ended. Raises DivergedWeightsError for logprobs that are NaN.
        """
        # Lazily: after a pause in a batch, the later batches do not begin.
        return all(batch.draw(model, self._sampling, pauses) for batch in self._batches)

    def collect_completions(self, policy_version: int) -> list[Completion]:
        """Return the completions in the order of their requests; see `build_completion`."""
        return [self.build_completion(n, policy_version) for n in range(self._num_requests)]

    def has_ended(self, n: int) -> bool:
        """Return whether the completion of a request has ended by itself."""
        batch, row = divmod(n, self._max_sequences)
        return self._batches[batch].reasons[row] != "abort"

    def build_completion(self, n: int, policy_version: int) -> Completion:
        """Return the completion of a request as it is now.

        `policy_version` is that of the weights, for completions without an adapter.
        """
        batch, row = divmod(n, self._max_sequences)
        return self._batches[batch].build_completion(row, policy_version)


class _Batch:
    """Completions that are decoded together."""

    def __init__(self, requests: Sequence[CompletionRequest]) -> None:
        self.requests = requests
        self.uniforms_NC: Tensor | None = None
        """Random numbers of all tokens, once the first is drawn."""
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
        """Tokens of each running completion."""
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.reasons: list[FinishReason] = ["abort"] * len(requests)
        """"abort" while a completion runs."""

    def build_completion(self, n: int, policy_version: int) -> Completion:
        """Return a completion as it is now."""
        if self.requests[n].adapter != NONE:
            policy_version = self.requests[n].adapter
        return Completion(
            token_ids=np.array(self.tokens[n], dtype=np.int32),
            logprobs=np.array(self.logprobs[n], dtype=np.float32),
            policy_versions=np.full(len(self.tokens[n]), policy_version, dtype=np.int32),
            finish_reason=self.reasons[n],
        )

    def append(self, n: int, token: int, logprob: float) -> None:
        """Add a token to a completion, which may end it."""
        self.tokens[n].append(token)
        self.logprobs[n].append(logprob)
        if self.requests[n].ends(self.tokens[n]):
            self.reasons[n] = "stop"
        elif len(self.tokens[n]) == self.requests[n].max_tokens:
            self.reasons[n] = "length"

    @torch.no_grad()
    def draw(self, model: Decoder, sampling: SamplingParams, pauses: Callable[[], bool]) -> bool:
        """Draw as `Drawing.draw`."""
        if not self.rows:
            return True
        if self.uniforms_NC is None:
            longest = max(request.max_tokens for request in self.requests)
            uniforms = [draw_uniforms(request.seed, longest) for request in self.requests]
            self.uniforms_NC = torch.stack(uniforms).to(model.embed_tokens.weight.device)

        with attach_caches(model, self.caches):
            while not pauses():
                self._drop_cancelled()
                if not self.rows:
                    break
                logits_BV = self._decode_next(model) if self.slots else self._prefill(model)
                logprobs_BV = process_logits(logits_BV, sampling)
                if sampling.temperature == 0:
                    tokens_B = logprobs_BV.argmax(-1)
                else:
                    tokens_B = draw(logprobs_BV, self.uniforms_NC[self.rows, self.num_drawn])
                self._add_tokens(tokens_B, logprobs_BV)
                self.num_drawn += 1

        # Keys and values are the largest part of a batch; a shared drawing may go on without it.
        if not self.rows:
            self.caches.clear()
        return not self.rows

    def _add_tokens(self, tokens_B: Tensor, logprobs_BV: Tensor) -> None:
        """Add a token to each running completion, and drop those that have ended."""
        logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).tolist()
        if any(math.isnan(logprob) for logprob in logprobs_B):
            raise DivergedWeightsError(DIVERGED)
        for row, token, logprob in zip(self.rows, tokens_B.tolist(), logprobs_B, strict=True):
            self.append(row, token, logprob)

        self.last_tokens = tokens_B
        self._keep([i for i, row in enumerate(self.rows) if self.reasons[row] == "abort"])

    def _drop_cancelled(self) -> None:
        # Before a forward: the adapter of a cancelled completion may be dropped at any time.
        self._keep([i for i, n in enumerate(self.rows) if not self.requests[n].is_cancelled()])

    def _keep(self, running: Sequence[int]) -> None:
        """Keep these of the completions that run, given by their places among them."""
        if len(running) == len(self.rows):
            return
        # The caches keep the slots of completions that have ended: to move the others would cost a
        # copy of all keys and values.
        self.rows = [self.rows[i] for i in running]
        if self.slots:
            self.slots = [self.slots[i] for i in running]
            self.last_tokens = self.last_tokens[list(running)]

    def _decode_next(self, model: Decoder) -> Tensor:
        """Put the last tokens into the cache; return the logits after them, [B, V]."""
        tokens_B = self.last_tokens
        positions: list[int] = []
        for n, slots in enumerate(self.slots):
            positions.append(len(slots))
            self.slots[n] = np.append(slots, self.num_cached + n)
        self.num_cached += len(self.slots)

        positions_B = torch.tensor(positions, device=tokens_B.device)
        layout = SequenceLayout.of_single_queries(self.slots, device=tokens_B.device)
        adapters_B = np.array([self.requests[n].adapter for n in self.rows])
        return _compute_logits(model, tokens_B, positions_B, layout, adapters_B)

    def _prefill(self, model: Decoder) -> Tensor:
        """Fill the cache with each prompt once; return each running request's logits, [B, V]."""
        device = model.embed_tokens.weight.device
        prompts: list[np.ndarray] = []
        adapters: list[int] = []
        num_samples: list[int] = []
        for request in (self.requests[n] for n in self.rows):
            # Samples of one prompt follow each other and hold the same array.
            if prompts and request.prompt is prompts[-1] and request.adapter == adapters[-1]:
                num_samples[-1] += 1
            else:
                prompts.append(request.prompt)
                adapters.append(request.adapter)
                num_samples.append(1)

        lengths = [len(prompt) for prompt in prompts]
        tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        layout = SequenceLayout.from_lengths(lengths, device=device)
        ends_P = np.cumsum(lengths)
        adapters_T = np.repeat(adapters, lengths)
        logits_PV = _compute_logits(
            model, tokens_T, positions_T, layout, adapters_T, rows=ends_P - 1
        )

        # All samples of a prompt read its keys and values from the same slots.
        for end, length, count in zip(ends_P, lengths, num_samples, strict=True):
            self.slots += [np.arange(end - length, end)] * count
        self.num_cached = int(ends_P[-1])
        return logits_PV.repeat_interleave(torch.tensor(num_samples, device=device), dim=0)


def _compute_logits(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    layout: SequenceLayout,
    adapters_T: np.ndarray,
    *,
    rows: np.ndarray | None = None,
) -> Tensor:
    """Return the logits at these rows, by default at all; each row has its version in the bank."""
    rows = np.arange(len(tokens)) if rows is None else rows
    selected = torch.from_numpy(rows).to(tokens.device)
    multiple = model.row_multiple

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
        # Padded again after the selection, so that the product has whole tiles of rows too.
        hidden = pad_rows(hidden_TE[selected], multiple)
        logits = F.linear(hidden, weight_VE)
        if model.bank is not None:
            padded = np.pad(adapters_T[rows], (0, len(hidden) - len(rows)), constant_values=NONE)
            model.bank.add_to_rows(HEAD, hidden, logits, padded)
        return logits[: len(rows)]

    inputs, positions = pad_rows(tokens, multiple), pad_rows(positions, multiple)
    _begin_forward(model, adapters_T, num_rows=len(inputs))
    return model(inputs, positions=positions, sequences=layout, head=head)


def _begin_forward(model: Decoder, adapters_T: np.ndarray, *, num_rows: int) -> None:
    """Give the rows of the next forward their adapters, and those of the padding none."""
    if model.bank is not None:
        padding = num_rows - len(adapters_T)
        model.bank.begin(np.pad(adapters_T, (0, padding), constant_values=NONE))
    else:
        assert (adapters_T == NONE).all(), "the model has no bank of adapters"


class CachedAttention(nn.Module):
    """Core attention that keeps keys and values of earlier forwards.

    The first forward reads prompts and replaces the cache; each later forward has one token of each
    completion and adds to it.
    """

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.kv = torch.empty(0)
        """Keys, then values of all tokens so far, [slots, 2K, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        """Return [T, H, D], with zeros for padding: the tokens beyond those of the layout."""
        num_tokens = layout.num_tokens
        kv = torch.cat((k, v), dim=1)[:num_tokens]
        self.kv = kv if layout.key_rows is None else torch.cat((self.kv, kv))
        keys, values = self.kv.chunk(2, dim=1)
        out = self.core(q[:num_tokens], keys, values, layout)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - num_tokens))


@contextmanager
def attach_caches(model: Decoder, caches: list[CachedAttention]) -> Iterator[None]:
    """Replace the model's core attention by one that reads and fills a cache, and permits padding.

    Args:
        caches: those of the layers; an empty list is filled with new caches.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [attention.core for attention in attentions]
    if not caches:
        caches += [CachedAttention(core) for core in cores]
    try:
        for attention, core, cache in zip(attentions, cores, caches, strict=True):
            cache.core = core
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
def prompt_logprobs(
    model: Decoder, prompt: np.ndarray, *, top_k: int = 0, adapter: int = NONE
) -> PromptLogprobs:
    """Return the predictions of a prompt, with its `top_k` most likely tokens.

    With a batch-invariant model the logprobs equal those of the trainer and of `generate` bit for
    bit.

    Args:
        prompt: [M] int token ids.
        adapter: version in the model's bank.
    """
    num_tokens, device = len(prompt), model.embed_tokens.weight.device
    multiple = model.row_multiple
    tokens_M = torch.from_numpy(prompt.astype(np.int64)).to(device)
    inputs_T = pad_rows(tokens_M, multiple)
    targets_T = pad_rows(tokens_M.roll(-1), multiple)
    positions_T = pad_rows(torch.arange(num_tokens, device=device), multiple)
    lengths = [num_tokens]
    if len(inputs_T) > num_tokens:
        lengths.append(len(inputs_T) - num_tokens)
    layout = SequenceLayout.from_lengths(lengths, device=device)

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, top_logprobs, top_ids = [], [], []
        # In chunks, because the logits of a whole long prompt would not fit beside the model.
        chunks = zip(hidden_TE.split(CHUNK_TOKENS), targets_T.split(CHUNK_TOKENS), strict=True)
        for hidden_CE, targets_C in chunks:
            logits_CV = F.linear(hidden_CE, weight_VE)
            if model.bank is not None:
                adapters_C = np.full(len(hidden_CE), adapter)
                model.bank.add_to_rows(HEAD, hidden_CE, logits_CV, adapters_C)
            logprobs_CV = logits_CV.float().log_softmax(-1)
            logprobs.append(logprobs_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1))
            top = logprobs_CV.topk(top_k, dim=-1)
            top_logprobs.append(top.values)
            top_ids.append(top.indices)
        return torch.cat(logprobs), torch.cat(top_logprobs), torch.cat(top_ids)

    _begin_forward(model, np.full(num_tokens, adapter), num_rows=len(inputs_T))
    predictions = model(inputs_T, positions=positions_T, sequences=layout, head=head)
    # Entry m of the predictions is about token m + 1.
    logprobs_M, top_Mk, ids_Mk = (x[:num_tokens].roll(1, 0).cpu().numpy() for x in predictions)
    if np.isnan(logprobs_M[1:]).any():
        raise DivergedWeightsError(DIVERGED)
    logprobs_M[0], top_Mk[0], ids_Mk[0] = np.nan, np.nan, -1  # Nothing predicts the first token.
    return PromptLogprobs(logprobs=logprobs_M, top_ids=ids_Mk.astype(np.int32), top_logprobs=top_Mk)
