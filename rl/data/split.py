"""Splits that depend on what a row says and on nothing else: not on a seed, not on its place in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def content_key(text: str) -> int:
    """64 bits of what is asked, spaces aside: rows with the same key are the same problem."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def is_held_out(key: int, *, share: float) -> bool:
    """Whether a problem belongs to the held-out share, 0 to 1 of all that can be asked."""
    return key < share * 2**64


def choose(keys: Sequence[int], most: int | None) -> list[int]:
    """Places of at most `most` rows, in order; which ones depends on what they say.

    Keys of a held-out share are all small, so they are hashed once more before they are compared.
    """
    places = range(len(keys))
    if most is None or most >= len(keys):
        return list(places)
    return sorted(sorted(places, key=lambda place: (content_key(str(keys[place])), place))[:most])
