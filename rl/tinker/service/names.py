"""Ids, names and paths: what they look like, and whose they are.

    session      <process>-<random>-<signature>
    model        <session>:train:<model_seq_id>
    sampler      <session>:sample:<sampling_session_seq_id>
    request      <model or sampler>:<seq_id>, or <model>:unload
    checkpoint   tinker://<model>/weights/<name>, tinker://<model>/sampler_weights/<name>

A session's signature is of its owner, with a key that this process alone knows. So it can be told of any id,
without keeping a list of all that ever were, whether it was given to the one who asks; ids of earlier
processes are told by their first part.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from rl.tinker.errors import GoneError, InvalidRequestError, NotFoundError
from rl.tinker.service.responses import CheckpointKind

_SESSION = r"(?P<session>(?P<process>[0-9a-f]{8})-(?P<random>[0-9a-f]{12})-(?P<signature>[0-9a-f]{16}))"
_NUMBER = r"[0-9]{1,19}"
_ID = re.compile(rf"{_SESSION}(?::(?:train|sample):{_NUMBER}(?::(?:{_NUMBER}|unload))?)?", re.ASCII)
_MODEL_ID = re.compile(rf"{_SESSION}:train:{_NUMBER}", re.ASCII)
_PATH = re.compile(r"tinker://(?P<run>[^/\s]+)/(?P<folder>weights|sampler_weights)/(?P<name>[^/]+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_SHOWN = 100
"""Characters of a wrong value that an error repeats."""

FOLDERS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
_KINDS: dict[str, CheckpointKind] = {folder: kind for kind, folder in FOLDERS.items()}


class Ids:
    """Those that this process gives out."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)

    def new_session(self, owner: str) -> str:
        random = secrets.token_hex(6)
        return f"{self._process}-{random}-{self._signature(random, owner)}"

    def check_session_of(self, any_id: str, owner: str) -> str:
        """The session that a session's, model's, sampler's or request's id begins with.

        Raises:
            NotFoundError: it was never given to this owner.
            GoneError: an earlier process of the server gave it to somebody.
        """
        parts = _ID.fullmatch(any_id)
        if parts is None:
            raise NotFoundError(f"there is no {shown(any_id)}")
        if parts["process"] != self._process:
            raise GoneError(
                f"{any_id} ended with the process of the server that it was begun in; what was saved is "
                "still there"
            )
        if not hmac.compare_digest(parts["signature"], self._signature(parts["random"], owner)):
            raise NotFoundError(f"there is no {any_id}")
        return parts["session"]

    def _signature(self, random: str, owner: str) -> str:
        return hmac.new(self._key, f"{random}\0{owner}".encode(), hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPath:
    """A `tinker://` path in its parts."""

    model_id: str
    kind: CheckpointKind
    name: str

    @property
    def checkpoint_id(self) -> str:
        return f"{FOLDERS[self.kind]}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"


def parse_path(path: str) -> CheckpointPath:
    """
    Raises:
        InvalidRequestError: it has not the form of a path.
        NotFoundError: it has, but nothing here was ever called so.
    """
    parts = _PATH.fullmatch(path)
    if parts is None:
        raise InvalidRequestError(
            f"path is {shown(path)}; it has the form tinker://<training run>/weights/<name> or "
            "tinker://<training run>/sampler_weights/<name>"
        )
    if not is_model_id(parts["run"]) or _NAME.fullmatch(parts["name"]) is None:
        raise NotFoundError(f"there is no checkpoint {shown(path)}")
    return CheckpointPath(model_id=parts["run"], kind=_KINDS[parts["folder"]], name=parts["name"])


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


def check_name(name: str, *, max_length: int) -> None:
    """
    Raises:
        InvalidRequestError: it could not be the name of a checkpoint.
    """
    if len(name) > max_length or _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"name is {shown(name)}; it has 1 to {max_length} letters, digits, '_', '-' and '.', "
            "and begins with a letter, digit or '_'"
        )


def owner_hash(owner: str) -> str:
    """What is kept on the disk of an owner's name, which may be a key."""
    return hashlib.sha256(f"owner of training runs\0{owner}".encode()).hexdigest()


def shown(value: str) -> str:
    """A value from outside, in an error's text."""
    return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")
