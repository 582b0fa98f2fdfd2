"""How tokens are drawn, the same for every sampler of ours: seeds, randomness, distribution.

A draw is the inverse of the cumulative distribution at one uniform number, which depends on
the request's seed and the token's place in the completion alone. So neither the batch a
request ran in, nor its being interrupted, nor the sampler that served it changes its tokens
(up to the rounding of the logits).

Shape legend: B rows drawn at once, V vocabulary, C tokens of one completion.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl.types import SamplingParams


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError naming the first field that is out of range."""
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


def request_seeds(prompts: Sequence[np.ndarray], *, seed: int, num_samples: int) -> list[list[int]]:
    """A seed for each completion, of the call's seed, the prompt's tokens and the sample's number.

    A prompt that comes twice counts its samples on. Below 2**63.
    """
    seen: Counter[bytes] = Counter()
    seeds = []
    for prompt in prompts:
        key = np.asarray(prompt, dtype=np.int32).tobytes()
        digest = hashlib.blake2b(key, digest_size=8, key=str(seed).encode()).digest()
        first = int.from_bytes(digest, "little") % 2**62 + seen[key]
        seeds.append([first + i for i in range(num_samples)])
        seen[key] += num_samples
    return seeds


def uniforms(seed: int, count: int) -> Tensor:
    """[C] float64 in [0, 1): what each token of a completion is decided by."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def processed_logprobs(logits_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """[B, V] float32 logprobs of the distribution that `sampling` draws from, -inf where it never draws.

    Temperature first, then top-k, then top-p of what is left, as vLLM does. Greedy decoding
    (temperature 0) reports the logprobs of temperature 1.
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
        drop_BV[:, -1] = False
        ascending_BV = ascending_BV.masked_fill(drop_BV, -torch.inf)
        logits_BV = torch.empty_like(logits_BV).scatter_(-1, order_BV, ascending_BV)
    return logits_BV.log_softmax(-1)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B] int64: the token at which the cumulative distribution passes the row's uniform number."""
    # The sum is kept in double precision: in single, a large vocabulary's tail is lost to rounding.
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    points_B1 = uniforms_B.unsqueeze(1) * cumulative_BV[:, -1:]
    # right=True never lands on a token of probability 0: its cumulative value is its predecessor's.
    tokens_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True)
    return tokens_B1.squeeze(1).clamp_(max=logprobs_BV.size(1) - 1)
