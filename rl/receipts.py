"""Receipts of completions: what a generator has read and sampled, sealed when it arrives.

The digest covers every token that the generator read, and ids, logprobs and versions of those that
it sampled. A ledger has both (`rl.ledger`), so that an edit on the way to the trainer shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rl.types import Completion  # which has a receipt

DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Origin of a completion."""

    generator: str
    request: str
    """Name of the request, which no other completion of the run has."""
    digest: bytes
    """Digest of `compute_digest`."""


def start_digest(context_T: np.ndarray) -> Any:
    """Return the hash of the tokens that a generator has read, to which completions are added."""
    started = hashlib.blake2b(digest_size=DIGEST_BYTES)
    started.update(len(context_T).to_bytes(8, "little"))
    started.update(np.ascontiguousarray(context_T, dtype=np.int32).data)
    return started


def finish_digest(
    started: Any, token_ids_C: np.ndarray, logprobs_C: np.ndarray, versions_C: np.ndarray
) -> bytes:
    """Return the digest of a completion of the context that `started` has read."""
    whole = started.copy()
    whole.update(np.ascontiguousarray(token_ids_C, dtype=np.int32).data)
    whole.update(np.ascontiguousarray(logprobs_C, dtype=np.float32).data)
    whole.update(np.ascontiguousarray(versions_C, dtype=np.int32).data)
    digest: bytes = whole.digest()
    return digest


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
        started = start_digest(prompt)
        group = []
        for c in completions:
            digest = finish_digest(started, c.token_ids, c.logprobs, c.policy_versions)
            receipt = Receipt(generator=generator, request=f"{call}.{number}", digest=digest)
            group.append(replace(c, receipt=receipt))
            number += 1
        sealed.append(group)
    return sealed
