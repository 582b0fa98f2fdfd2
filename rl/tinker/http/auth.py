"""Who may call, and which owner a caller is.

A key is never kept: what it owns is filed under its SHA-256, and configured keys are compared by that, all of
them in constant time. The text of a key never gets into a log or an error.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

PREFIX = "tml-"
"""The official client refuses keys that begin otherwise."""
MIN_LENGTH = 20


class Keys:
    """The keys that may call; without any, each key is its own owner."""

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        """
        Raises:
            ValueError: an unsafe key, named by its number in order.
        """
        self._digests: tuple[str, ...] | None = None
        if keys is not None:
            texts = list(keys)
            for number, key in enumerate(texts, start=1):
                if not (key.isascii() and key.isprintable() and key.startswith(PREFIX)) or " " in key:
                    raise ValueError(f"API key {number}: must be printable ASCII that begins with {PREFIX!r}")
                if len(key) < MIN_LENGTH:
                    raise ValueError(
                        f"API key {number}: {len(key)} characters, must be at least {MIN_LENGTH}"
                    )
            if not texts:
                raise ValueError("API keys: there are none; leave them out to accept any key on loopback")
            self._digests = tuple(_digest(key.encode()) for key in texts)

    @property
    def configured(self) -> bool:
        """Whether only certain keys are accepted."""
        return self._digests is not None

    def owner(self, key: bytes) -> str | None:
        """The owner that a key stands for; None if it may not call."""
        digest = _digest(key)
        if self._digests is None:
            return digest if key else None
        # Every key is compared, so that the time says neither whether one fits nor which.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(fits) else None


def read_keys(*, file: str | None, environment: str | None) -> Keys:
    """The keys of a file, one a line (`#` begins a comment), or of an environment variable, with commas.

    Raises:
        ValueError: both are given, one of them is not there or holds no key, or others can read the file.
    """
    if file is not None and environment is not None:
        raise ValueError(f"keys_file={file!r} and keys_env={environment!r}: give one of them")
    if file is not None:
        return _keys(_lines(Path(file).expanduser()), source=f"keys_file={file!r}")
    if environment is not None:
        if environment not in os.environ:
            raise ValueError(f"keys_env={environment!r}: no such environment variable")
        return _keys(os.environ[environment].split(","), source=f"keys_env={environment!r}")
    return Keys()


def _keys(texts: Iterable[str], *, source: str) -> Keys:
    try:
        return Keys([text.strip() for text in texts if text.strip()])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _lines(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"keys_file={str(path)!r}: others may read or write it; chmod 600 it")
        return [line.partition("#")[0] for line in path.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"keys_file={str(path)!r}: cannot be read: {error}") from None


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
