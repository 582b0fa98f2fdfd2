"""What a model says of the tokens of given prompts: their logprobs, and the likeliest tokens in their places.

Shape legend: N tokens of one prompt, T packed tokens, C tokens of one chunk, K likeliest tokens, E model
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.rows import ROW_MULTIPLE
from rl.models.qwen3.model import Qwen3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptLogprobs:
    """Entry n of each array is about token n, given those before it; nothing is said of the first."""

    logprobs: np.ndarray
    """[N] float32, nats, at temperature 1; NaN first."""
    top_ids: np.ndarray
    """[N, K] int32, likeliest first; -1 in the first row."""
    top_logprobs: np.ndarray
    """[N, K] float32, nats; NaN in the first row."""


@torch.no_grad()
def prompt_logprobs(
    model: Qwen3,
    prompts: Sequence[np.ndarray],
    *,
    top_k: int = 0,
    max_tokens: int = 8192,
    chunk_tokens: int = 512,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[PromptLogprobs]:
    """Of each prompt ([N] int token ids), in order.

    With a batch-invariant model the logprobs have the bits of the trainer's, and of what `generate` returns.

    Args:
        top_k: how many of the likeliest tokens; 0: none.
        max_tokens: of one forward, as far as prompts are not longer.
        chunk_tokens: how many tokens' logits exist at once.
        is_cancelled: asked before each forward; once it is true, what is returned lacks the other prompts.

    Raises:
        ValueError: a prompt that is empty or longer than the context, or a setting out of range.
    """
    context, vocab_size = model.config.rope.max_positions, model.config.vocab_size
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: must be 1 to {context}")
    if not 0 <= top_k <= vocab_size:
        raise ValueError(f"top_k={top_k}: must be 0 to {vocab_size}, the vocabulary")
    for name, value in (("max_tokens", max_tokens), ("chunk_tokens", chunk_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    answers: list[PromptLogprobs] = []
    for group in _groups(prompts, max_tokens=max_tokens):
        if is_cancelled():
            break
        answers += _of_group(model, group, top_k=top_k, chunk_tokens=chunk_tokens)
    return answers


def _groups(prompts: Sequence[np.ndarray], *, max_tokens: int) -> Iterator[list[np.ndarray]]:
    """In order, as many as there is room for."""
    group: list[np.ndarray] = []
    room = max_tokens
    for prompt in prompts:
        if group and len(prompt) - 1 > room:
            yield group
            group, room = [], max_tokens
        group.append(prompt)
        room -= len(prompt) - 1
    if group:
        yield group


def _of_group(
    model: Qwen3, prompts: Sequence[np.ndarray], *, top_k: int, chunk_tokens: int
) -> list[PromptLogprobs]:
    lengths = [len(prompt) - 1 for prompt in prompts]
    num_tokens = sum(lengths)
    logprobs_T: np.ndarray = np.empty(0, dtype=np.float32)
    ids_TK = np.empty((0, top_k), dtype=np.int32)
    top_TK = np.empty((0, top_k), dtype=np.float32)
    if num_tokens:
        values = _forward(model, prompts, top_k=top_k, chunk_tokens=chunk_tokens)
        logprobs_T, ids_TK, top_TK = (value.cpu().numpy()[:num_tokens] for value in values)
    ends = np.cumsum(lengths)[:-1]
    parts = zip(np.split(logprobs_T, ends), np.split(ids_TK, ends), np.split(top_TK, ends), strict=True)
    return [
        PromptLogprobs(
            logprobs=np.concatenate((np.full(1, np.nan, dtype=np.float32), logprobs)),
            top_ids=np.concatenate((np.full((1, top_k), -1), ids)).astype(np.int32),
            top_logprobs=np.concatenate((np.full((1, top_k), np.nan, dtype=np.float32), top)),
        )
        for logprobs, ids, top in parts
    ]


def _forward(
    model: Qwen3, prompts: Sequence[np.ndarray], *, top_k: int, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [T], and the likeliest tokens and their logprobs [T, K], of all prompts and the padding."""
    device = model.embed_tokens.weight.device
    # A prompt of one token asks nothing. Padding to whole tiles of rows is a sequence of its own.
    pieces = [np.asarray(prompt, dtype=np.int64) for prompt in prompts if len(prompt) > 1]
    padding = -sum(len(piece) - 1 for piece in pieces) % ROW_MULTIPLE
    if padding:
        pieces.append(np.zeros(padding + 1, dtype=np.int64))
    inputs_T = torch.from_numpy(np.concatenate([piece[:-1] for piece in pieces])).to(device)
    targets_T = torch.from_numpy(np.concatenate([piece[1:] for piece in pieces])).to(device)
    lengths = [len(piece) - 1 for piece in pieces]
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)

    def head(hidden_TE: Tensor, weight_VE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = -(-chunk_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        chunks = zip(hidden_TE.split(size), targets_T.split(size), strict=True)
        parts = [_of_chunk(hidden, weight_VE, targets, top_k=top_k) for hidden, targets in chunks]
        logprobs, ids, top = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(ids), torch.cat(top)

    layout = SequenceLayout.from_lengths(lengths, device=device)
    return model(inputs_T, positions=positions_T, sequences=layout, head=head)


def _of_chunk(
    hidden_CE: Tensor, weight_VE: Tensor, targets_C: Tensor, *, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_CV = F.linear(hidden_CE, weight_VE).float().log_softmax(-1)
    logprobs_C = logprobs_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1)
    top_CK, ids_CK = logprobs_CV.topk(top_k, dim=-1)
    return logprobs_C, ids_CK.int(), top_CK
