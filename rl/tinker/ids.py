"""Ids, names and paths.

session      <process>-<random>
model        <session>:train:<model_seq_id>
sampler      <session>:sample:<sampling_session_seq_id>
request      <model or sampler>:<seq_id>, or <model>:unload
checkpoint   tinker://<model>/weights/<name>, tinker://<model>/sampler_weights/<name>
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.tinker.types import CheckpointKind, InvalidRequestError, NotFoundError

SESSION = r"[0-9a-f]{8}-[0-9a-f]{16}"
MAX_SEQ_ID = 2**63 - 1
MAX_TTL_S = 10 * 365 * 24 * 3600
_MODEL_ID = re.compile(rf"{SESSION}:train:[0-9]{{1,19}}")
_PATH = re.compile(r"tinker://(?P<run>[^/\s]+)/(?P<folder>weights|sampler_weights)/(?P<name>[^/]+)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

FOLDERS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
_KINDS: dict[str, CheckpointKind] = {folder: kind for kind, folder in FOLDERS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPath:
    """The parts of a `tinker://` path."""

    model_id: str
    kind: CheckpointKind
    name: str

    @property
    def checkpoint_id(self) -> str:
        return f"{FOLDERS[self.kind]}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"


def parse_path(path: str) -> CheckpointPath:
    """Parse a path.

    Raises:
        InvalidRequestError: the text does not have the form of a path.
        NotFoundError: no checkpoint can have this path.
    """
    parts = _PATH.fullmatch(path)
    if parts is None:
        raise InvalidRequestError(
            f"path={path!r:.100}: must have the form tinker://<training run>/weights/<name> or "
            "tinker://<training run>/sampler_weights/<name>"
        )
    if not is_model_id(parts["run"]) or _NAME.fullmatch(parts["name"]) is None:
        raise NotFoundError(f"there is no checkpoint {path!r:.100}")
    return CheckpointPath(model_id=parts["run"], kind=_KINDS[parts["folder"]], name=parts["name"])


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Raise InvalidRequestError unless the text can name a checkpoint."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"name={name!r:.100}: must have 1 to 128 letters, digits, '_', '-' and '.', and begin with a "
            "letter, a digit or '_'"
        )


def check_seq_id(name: str, value: int | None, *, first: int) -> int:
    if value is None or not first <= value <= MAX_SEQ_ID:
        raise InvalidRequestError(
            f"{name}={value!r:.100}: must be a whole number from {first} to {MAX_SEQ_ID}"
        )
    return value


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise InvalidRequestError(f"ttl_seconds={ttl_seconds!r:.100}: must be 1 to {MAX_TTL_S}, or None")


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raise InvalidRequestError unless all values are texts that an answer can hold."""
    for key, value in (metadata or {}).items():
        try:
            (key + value).encode()
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                f"user_metadata[{key!a:.100}]: {value!a:.100}, must be a text"
            ) from None


def owner_hash(owner: str) -> str:
    """Return what is written to the disk in place of an owner, which may be derived from a key."""
    return hashlib.sha256(f"owner of training runs\0{owner}".encode()).hexdigest()
