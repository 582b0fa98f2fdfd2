"""API keys, and the file that they stand in.

The hash of a key, its owner, stands for the key: the time of comparing hashes reveals nothing about
a key, and no log or error has its text.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Collection
from pathlib import Path

from rl.utils.proxies import is_loopback

MAX_LENGTH = 4096
"""Bytes of the longest key."""
LEAST_RANDOM = 16
"""Characters after the prefix of the shortest key of a file."""


class Keys:
    """The keys that may call; None: any key may, and each is its own owner."""

    def __init__(self, keys: Collection[str] | None = None, *, prefix: str = "") -> None:
        """Raise ValueError for an unsafe key, which the text names by its position.

        Args:
            prefix: first characters of every key.
        """
        self._owners: frozenset[str] | None = None
        if keys is None:
            return
        if not keys:
            raise ValueError(
                "API keys: there are none; leave them out to accept any key on loopback"
            )
        for number, key in enumerate(keys, start=1):
            if not re.fullmatch(rf"{re.escape(prefix)}[!-~]{{{LEAST_RANDOM},}}", key):
                begin = f"{prefix!r} and " if prefix else ""
                raise ValueError(
                    f"API key {number}: must be {begin}{LEAST_RANDOM} or more printable ASCII "
                    "characters"
                )
        self._owners = frozenset(_hash_owner(key.encode()) for key in keys)

    @property
    def configured(self) -> bool:
        """True if only some keys may call."""
        return self._owners is not None

    def find_owner(self, key: bytes) -> str | None:
        """Return a key's owner, or None if the key may not call."""
        if len(key) > MAX_LENGTH:
            return None
        owner = _hash_owner(key)
        # The set is of hashes, so the time of the look-up tells nothing about a key.
        may_call = bool(key) if self._owners is None else owner in self._owners
        return owner if may_call else None


def read_keys(file: str | None, *, prefix: str = "") -> Keys:
    """Read keys from a file, one per line with `#` comments; without a file any key may call.

    Raises:
        ValueError: the file is missing or has no key, or other users can read it.
    """
    if file is None:
        return Keys()
    try:
        path = Path(file).expanduser()
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError("others may read or write it; chmod 600 it")
        texts = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        return Keys([text for text in texts if text], prefix=prefix)
    except (OSError, ValueError) as error:
        raise ValueError(f"keys_file={file!r}: {error}") from None


def check_reach(host: str, keys: Keys) -> None:
    """Raise ValueError for a server that other machines reach without a key."""
    if not is_loopback(host) and not keys.configured:
        raise ValueError(
            f"host={host!r}: can be reached from other machines, so API keys are needed; give "
            "keys_file, or listen on 127.0.0.1"
        )


def _hash_owner(key: bytes) -> str:
    # Twice, the second time with a purpose: the stored hash of an owner is not the plain hash of a
    # key. Training runs on disks carry it, so it never changes.
    digest = hashlib.sha256(key).hexdigest()
    return hashlib.sha256(f"owner of training runs\0{digest}".encode()).hexdigest()
