"""Receipts for the completions of a call, made where they arrive from the generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl.receipts import Receipt, finish_digest, start_digest
from rl.types import Completion


def seal(
    groups: Sequence[Sequence[Completion]],
    prompts: Sequence[np.ndarray],
    *,
    generator: str,
    call: str,
) -> list[list[Completion]]:
    """Return the completions of each prompt with receipts; `call` is the name of the call."""
    sealed = []
    number = 0
    for prompt, completions in zip(prompts, groups, strict=True):
        # Once for all samples of a prompt.
        started = start_digest(prompt)
        group = []
        for c in completions:
            digest = finish_digest(started, c.token_ids, c.logprobs, c.policy_versions)
            receipt = Receipt(generator=generator, request=f"{call}.{number}", digest=digest)
            group.append(replace(c, receipt=receipt))
            number += 1
        sealed.append(group)
    return sealed
