"""Training runs and checkpoints on the disk.

    <folder>/<model id, "." for ":">/run.json                       hash of the owner's key, settings, metadata
    .../weights/<name>@<version>/checkpoint.json, data/             `data` is written by the backend
    .../sampler_weights/<name>@<version>/checkpoint.json, data/

A checkpoint appears whole or not at all. One that replaces another gets the next version; the newest version
counts, and older ones that a kill left behind go at the next start. An expired checkpoint is not found any more
and is removed by `sweep`. Reading a checkpoint that is deleted meanwhile fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from rl.tinker.futures import in_thread
from rl.tinker.types import (
    FOLDERS,
    CheckpointKind,
    CheckpointPath,
    InvalidRequestError,
    LimitReachedError,
    Limits,
    Metadata,
    ModelSettings,
    NotFoundError,
    is_model_id,
    parse_path,
)
from rl.utils.files import atomic_folder, atomic_write, publish, remove, remove_leftovers, temporary_folder

log = logging.getLogger(__name__)

_RUN, _CHECKPOINT, _DATA = "run.json", "checkpoint.json", "data"
_OTHER_KIND: dict[CheckpointKind, str] = {
    "training": "has weights to sample from; only those of save_state can be trained",
    "sampler": "has weights for training; save_weights_for_sampler saves those to sample from",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Content of run.json; times are Unix seconds."""

    format: Literal[1] = 1
    model_id: str
    session_id: str
    owner_hash: str
    """The owner, who is the hash of a key (auth.py)."""
    settings: ModelSettings
    created_s: float
    user_metadata: Metadata | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """Content of checkpoint.json; times are Unix seconds."""

    format: Literal[1] = 1
    settings: ModelSettings
    created_s: float
    expires_s: float | None
    size_bytes: int
    user_metadata: Metadata | None


RecordT = TypeVar("RecordT", RunRecord, CheckpointRecord)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (RunRecord, CheckpointRecord)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One version of a checkpoint."""

    path: CheckpointPath
    folder: Path
    record: CheckpointRecord

    @property
    def data(self) -> Path:
        """Folder that the backend wrote."""
        return self.folder / _DATA


class Storage:
    """Checkpoints of all owners. Methods that scan folders are meant for a thread (`in_thread`)."""

    def __init__(self, folder: str | Path, *, limits: Limits, wall_time_s: Callable[[], float]) -> None:
        self._root = Path(folder).absolute()
        self._limits = limits
        self._wall_time_s = wall_time_s

    def prepare(self) -> None:
        """Create the folder, and remove what is half written, replaced, expired or empty.

        Raises:
            ValueError: the folder cannot be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with temporary_folder(self._root / "test"):
                pass
        except OSError as error:
            raise ValueError(f"storage_folder={str(self._root)!r}: cannot be written: {error}") from error
        remove_leftovers(self._root)
        for run in self._runs():
            for folder in FOLDERS.values():
                remove_leftovers(run / folder)
        self.sweep()
        for run in self._runs():
            if not any(any((run / one).iterdir()) for one in FOLDERS.values() if (run / one).is_dir()):
                _remove(run)

    def sweep(self) -> None:
        """Remove expired and replaced checkpoints."""
        for run in self._runs():
            for folder in FOLDERS.values():
                for versions in _versions(run / folder).values():
                    for older in versions[:-1]:
                        _remove(older)
                    record = _read(versions[-1] / _CHECKPOINT, CheckpointRecord)
                    if record is not None and self._has_expired(record):
                        _remove(versions[-1])

    # Reading

    def runs(self, owner: str) -> list[RunRecord]:
        """Return an owner's runs, newest first."""
        records = [_read(run / _RUN, RunRecord) for run in self._runs()]
        own = [record for record in records if record is not None and record.owner_hash == owner]
        return sorted(own, key=lambda record: record.created_s, reverse=True)

    def run(self, model_id: str, owner: str) -> RunRecord | None:
        record = _read(self._run(model_id) / _RUN, RunRecord) if is_model_id(model_id) else None
        return record if record is not None and record.owner_hash == owner else None

    def checkpoints(self, model_id: str) -> list[Stored]:
        """Return a run's checkpoints of both kinds, newest first."""
        found = [
            self._last(CheckpointPath(model_id=model_id, kind=kind, name=name), versions)
            for kind, folder in FOLDERS.items()
            for name, versions in _versions(self._run(model_id) / folder).items()
        ]
        whole = [stored for stored in found if stored is not None]
        return sorted(whole, key=lambda stored: (stored.record.created_s, str(stored.path)), reverse=True)

    def find(self, path: CheckpointPath, owner: str) -> Stored:
        stored = self._newest(path) if self.run(path.model_id, owner) is not None else None
        if stored is None:
            raise NotFoundError(f"there is no checkpoint {path}")
        return stored

    def find_weights(self, path: str, kind: CheckpointKind, owner: str, *, base_model: str | None) -> Stored:
        """Find the checkpoint at a path, which must be of this kind and, unless None, of this base model.

        Raises:
            InvalidRequestError, NotFoundError: there is none.
        """
        parsed = parse_path(path)
        if parsed.kind != kind:
            raise InvalidRequestError(f"path={path}: {_OTHER_KIND[kind]}")
        stored = self.find(parsed, owner)
        own = stored.record.settings.base_model
        if base_model not in (None, own):
            raise InvalidRequestError(f"base_model={base_model!r}: must be {own!r}, as in {path}")
        return stored

    # Writing

    async def save(
        self,
        run: RunRecord,
        path: CheckpointPath,
        write: Callable[[Path], Awaitable[None]],
        *,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Metadata | None,
    ) -> None:
        """Let `write` fill an empty folder, and publish it as a checkpoint.

        Raises:
            InvalidRequestError: the name is taken and `overwrite` is False.
            LimitReachedError: `limits.storage_bytes` is reached.
        """
        await in_thread(self._check_room, run, path, overwrite=overwrite)
        await in_thread(self._make_run, run)
        parent = self._run(path.model_id) / FOLDERS[path.kind]
        older = self._versions_of(path)
        latest = int(older[-1].name.rpartition("@")[2]) if older else 0
        folder = parent / f"{path.name}@{latest + 1}"
        parent.mkdir(exist_ok=True)
        with temporary_folder(folder) as temporary:
            data = temporary / _DATA
            data.mkdir()
            await write(data)
            now_s = self._wall_time_s()
            record = CheckpointRecord(
                settings=run.settings,
                created_s=now_s,
                expires_s=None if ttl_seconds is None else now_s + ttl_seconds,
                size_bytes=sum(file.stat().st_size for file in data.rglob("*") if file.is_file()),
                user_metadata=user_metadata,
            )
            await in_thread(_write, temporary / _CHECKPOINT, record)
            await in_thread(publish, temporary, folder)
        for replaced in older:
            await in_thread(_remove, replaced)

    def _check_room(self, run: RunRecord, path: CheckpointPath, *, overwrite: bool) -> None:
        if not overwrite and self._newest(path) is not None:
            raise InvalidRequestError(
                f"name={path.name!r}: {path} exists already; overwrite it, or choose another name"
            )
        if (most := self._limits.storage_bytes) is not None:
            stored = [
                one for record in self.runs(run.owner_hash) for one in self.checkpoints(record.model_id)
            ]
            taken = sum(one.record.size_bytes for one in stored if one.path != path)
            if taken >= most:
                raise LimitReachedError(
                    f"limit storage_bytes: checkpoints take {taken} of {most}; delete some"
                )

    def _make_run(self, run: RunRecord) -> None:
        folder = self._run(run.model_id)
        if not (folder / _RUN).exists():
            with suppress(FileExistsError), atomic_folder(folder) as temporary:
                _write(temporary / _RUN, run)

    def delete(self, path: CheckpointPath, owner: str) -> None:
        self.find(path, owner)
        for folder in self._versions_of(path):  # oldest first, so that a kill revives none of them
            _remove(folder)

    def set_expiry(self, path: CheckpointPath, owner: str, ttl_seconds: int | None) -> None:
        stored = self.find(path, owner)
        expires_s = None if ttl_seconds is None else self._wall_time_s() + ttl_seconds
        _write(stored.folder / _CHECKPOINT, replace(stored.record, expires_s=expires_s))

    # Folders

    def _run(self, model_id: str) -> Path:
        assert is_model_id(model_id)
        return self._root / model_id.replace(":", ".")

    def _runs(self) -> list[Path]:
        return [run for run in self._root.iterdir() if is_model_id(run.name.replace(".", ":"))]

    def _versions_of(self, path: CheckpointPath) -> list[Path]:
        """Return the versions of one checkpoint, oldest first."""
        return _versions(self._run(path.model_id) / FOLDERS[path.kind]).get(path.name, [])

    def _newest(self, path: CheckpointPath) -> Stored | None:
        return self._last(path, self._versions_of(path))

    def _last(self, path: CheckpointPath, versions: Sequence[Path]) -> Stored | None:
        record = _read(versions[-1] / _CHECKPOINT, CheckpointRecord) if versions else None
        if record is None or self._has_expired(record):
            return None
        return Stored(path=path, folder=versions[-1], record=record)

    def _has_expired(self, record: CheckpointRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._wall_time_s()


def _versions(parent: Path) -> dict[str, list[Path]]:
    """Return the folders of each checkpoint in a run's `weights` or `sampler_weights`, oldest version first."""
    found: dict[str, dict[int, Path]] = {}
    for folder in parent.iterdir() if parent.is_dir() else ():
        name, _, version = folder.name.rpartition("@")
        if version.isascii() and version.isdigit() and not name.startswith("."):
            found.setdefault(name, {})[int(version)] = folder
    return {name: [versions[number] for number in sorted(versions)] for name, versions in found.items()}


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        remove(folder)


def _write(path: Path, record: RunRecord | CheckpointRecord) -> None:
    """Write a record so that a kill leaves the old file or the new one."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(_ADAPTERS[type(record)].dump_json(record, indent=2))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return a record, or None where the file is missing or, with a warning, damaged."""
    try:
        record: RecordT = _ADAPTERS[kind].validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None
    return record
