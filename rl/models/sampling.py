"""Rules of sampling that all samplers share: seeds, random numbers, distribution, stop conditions.

A token is the inverse of the cumulative distribution at one uniform number, which depends only on
the request's seed and the token's position in the completion. Neither the batch of a request, nor
an interruption, nor the choice of sampler changes its tokens, up to the rounding of the logits.

Shape legend: B rows sampled at once, V vocabulary, C tokens of one completion, N blocks of W
tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl.types import SamplingParams

End = Callable[[Sequence[int]], bool]
"""Returns whether a completion of these tokens has to end."""

BLOCK_TOKENS = 128
"""Tokens of a block in the search of a drawn token."""
STOP_TEXT_MARGIN = 8
"""Tokens decoded before the longest stop text, so that it is spelled as in the whole text."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError naming the first field that is out of range."""
    for name, valid, rule in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("num_samples", sampling.num_samples >= 1, "at least 1"),
        ("temperature", sampling.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (off) or more"),
        ("stop_texts", "" not in sampling.stop_texts, "texts that are not empty"),
    ):
        if not valid:
            raise ValueError(f"sampling.{name}={getattr(sampling, name)}: must be {rule}")


def request_seeds(
    prompts: Sequence[np.ndarray], *, seed: int, num_samples: int, first_sample: int = 0
) -> list[list[int]]:
    """Derive a seed below 2**63 for each completion from seed, prompt and number of the sample.

    The samples of a prompt are numbered from `first_sample`, consecutively if it occurs twice.
    """
    seen: Counter[bytes] = Counter()
    seeds = []
    for prompt in prompts:
        key = np.asarray(prompt, dtype=np.int32).tobytes()
        # Not `hash`, which differs between processes: a run must draw the same after a restart.
        digest = hashlib.blake2b(key, digest_size=8, key=str(seed).encode()).digest()
        first = int.from_bytes(digest, "little") % 2**62 + first_sample + seen[key]
        seeds.append([first + i for i in range(num_samples)])
        seen[key] += num_samples
    return seeds


def draw_uniforms(seed: int, count: int) -> Tensor:
    """Return the random numbers that decide each token of a completion, [C] float64 in [0, 1).

    Example:
        A longer completion begins with the numbers of a shorter one:

        >>> torch.equal(draw_uniforms(7, 4)[:2], draw_uniforms(7, 2))
        True
    """
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def process_logits(logits_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the logprobs of the sampled distribution, [B, V] float32, with -inf for excluded
    tokens.

    Temperature applies first, then top-k, then top-p of the remainder, as in vLLM. Greedy decoding
    (temperature 0) reports the logprobs of temperature 1.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> process_logits(logits, SamplingParams(max_tokens=1, top_k=2)).exp()
        tensor([[0.7311, 0.2689, 0.0000]])
    """
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)

    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.size(-1):
        smallest_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if sampling.top_p < 1:
        ascending_BV, order_BV = logits_BV.sort(-1)
        drop_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop_BV[:, -1] = False  # The most likely token stays, however small top_p is.
        ascending_BV = ascending_BV.masked_fill(drop_BV, -torch.inf)
        logits_BV = torch.empty_like(logits_BV).scatter_(-1, order_BV, ascending_BV)
    return logits_BV.log_softmax(-1)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the token at which each row's cumulative distribution passes its uniform number.

    The result is [B] int64. The block of tokens is searched first, then the token in the block, so
    that only a small part of the distribution is summed in order. Sums over blocks are in double
    precision: in single precision a large vocabulary's tail is lost to rounding.
    """
    probs_BV = logprobs_BV.exp()
    padding = -probs_BV.size(1) % BLOCK_TOKENS
    if padding:
        probs_BV = F.pad(probs_BV, (0, padding))

    probs_BNW = probs_BV.unflatten(1, (-1, BLOCK_TOKENS))
    blocks_B, within_B = _search(probs_BNW.sum(-1), uniforms_B)
    rows_B = torch.arange(len(blocks_B), device=blocks_B.device)
    tokens_B, _ = _search(probs_BNW[rows_B, blocks_B], within_B)
    return (blocks_B * BLOCK_TOKENS + tokens_B).clamp_(max=logprobs_BV.size(1) - 1)


def _search(weights_BN: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the share `uniforms_B` of each row's sum lies, and the share of that weight.

    They are [B] int64 and [B].
    """
    cumulative_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    totals_B1 = cumulative_BN[:, -1:]
    # Below the total, and right=True: a weight of 0, whose sum equals its predecessor's, is never
    # found.
    points_B1 = torch.minimum(uniforms_B.unsqueeze(1) * totals_B1, totals_B1 * (1 - 2**-52))
    found_B1 = torch.searchsorted(cumulative_BN, points_B1, right=True).clamp_(
        max=weights_BN.size(1) - 1
    )
    weights_B1 = weights_BN.gather(1, found_B1)
    within_B1 = (points_B1 - cumulative_BN.gather(1, found_B1)) / weights_B1 + 1
    return found_B1.squeeze(1), within_B1.squeeze(1).clamp_(min=0)


def spells_any(texts: Sequence[str], tokens: Sequence[int], *, tokenizer: Any) -> bool:
    """Return whether the last token completes one of the stop texts; earlier tokens were checked.

    A token is at least one byte, so a text of n bytes lies within the last n tokens.
    """
    if not texts:
        return False
    num_tokens = max(len(text.encode()) for text in texts) + STOP_TEXT_MARGIN
    decoded = tokenizer.decode(list(tokens[-num_tokens:]), clean_up_tokenization_spaces=False)
    return any(text in decoded for text in texts)
