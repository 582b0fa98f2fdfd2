"""Receipts of completions: what a generator has read and sampled, sealed when it arrives.

The digest covers every token that the generator read, and ids, logprobs and versions of those that
it sampled. A ledger has both (`rl.ledger`), so that an edit on the way to the trainer shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

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
