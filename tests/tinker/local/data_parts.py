"""Data of the wire that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.tinker.messages import Datum


def datum(tokens: list[int], targets: Any = None, **inputs: Any) -> Datum:
    """`targets` None: the tokens that follow, and 7 after the last."""
    if targets is None:
        targets = [*tokens[1:], 7]
    found: Mapping[str, Any] = {
        "target_tokens": np.array(targets, np.int64),
        **{name: np.asarray(values, np.float32) for name, values in inputs.items()},
    }
    return Datum(tokens=np.array(tokens, np.int32), loss_inputs=found)


def random_data(count: int, *, seed: int, policy: bool = False, vocab: int = 256) -> list[Datum]:
    """Of 4 to 23 tokens, the first third without weight or advantage."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        num_tokens = int(random.integers(4, 24))
        tokens = random.integers(0, vocab, num_tokens).tolist()
        counts = np.arange(num_tokens) >= num_tokens // 3
        if policy:
            advantages = np.where(counts, random.normal(0, 1), 0.0)
            logprobs = np.where(counts, random.normal(-5.7, 0.3, num_tokens), 0.0)
            data.append(datum(tokens, advantages=advantages, logprobs=logprobs))
        else:
            data.append(datum(tokens, weights=counts))
    return data
