"""Training runs and checkpoints on the disk.

    <folder>/<model id, "." for ":">/run.json                       hash of the owner, settings, metadata
    .../weights/<name>@<version>/checkpoint.json, data/             `data` is written by the backend
    .../sampler_weights/<name>@<version>/checkpoint.json, data/

A checkpoint appears whole or not at all. One that replaces another gets the next version; the newest version
counts, and older ones that a kill left behind go at the next start. An expired checkpoint is not found any more
and is removed by `sweep`. Reading a checkpoint that is deleted meanwhile fails.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rl.tinker.ids import FOLDERS, CheckpointPath, is_model_id, owner_hash
from rl.tinker.limits import Limits
from rl.tinker.parts import in_thread
from rl.tinker.types import (
    InvalidRequestError,
    LimitReachedError,
    LoRASettings,
    Metadata,
    ModelSettings,
    NotFoundError,
)
from rl.utils.files import atomic_folder, atomic_write, publish, remove, remove_leftovers, temporary_folder

log = logging.getLogger(__name__)

FORMAT = 1
_RUN, _CHECKPOINT, _DATA = "run.json", "checkpoint.json", "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Content of run.json; times are Unix seconds."""

    model_id: str
    session_id: str
    owner_hash: str
    settings: ModelSettings
    created_s: float
    user_metadata: Metadata | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """Content of checkpoint.json; times are Unix seconds."""

    settings: ModelSettings
    created_s: float
    expires_s: float | None
    size_bytes: int
    user_metadata: Metadata | None


RecordT = TypeVar("RecordT", RunRecord, CheckpointRecord)


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
            _remove_if_empty(run)

    def sweep(self) -> None:
        """Remove expired and replaced checkpoints."""
        for run in self._runs():
            for folder in FOLDERS.values():
                newest: dict[str, Path] = {}
                for name, _, version in sorted(_versions(run / folder)):
                    if (older := newest.get(name)) is not None:
                        _remove(older)
                    newest[name] = version
                for version in newest.values():
                    record = _read(version / _CHECKPOINT, CheckpointRecord)
                    if record is not None and self._has_expired(record):
                        _remove(version)

    # Reading

    def runs(self, owner: str) -> list[RunRecord]:
        """Return an owner's runs, newest first."""
        records = [_read(run / _RUN, RunRecord) for run in self._runs()]
        own = [record for record in records if record is not None and record.owner_hash == owner_hash(owner)]
        return sorted(own, key=lambda record: record.created_s, reverse=True)

    def run(self, model_id: str, owner: str) -> RunRecord | None:
        record = _read(self._run(model_id) / _RUN, RunRecord) if is_model_id(model_id) else None
        return record if record is not None and record.owner_hash == owner_hash(owner) else None

    def checkpoints(self, model_id: str) -> list[Stored]:
        """Return a run's checkpoints of both kinds, newest first."""
        found = []
        for kind, folder in FOLDERS.items():
            newest: dict[str, tuple[int, Path]] = {}
            for name, version, at in _versions(self._run(model_id) / folder):
                newest[name] = max(newest.get(name, (0, at)), (version, at))
            for name, (_, at) in newest.items():
                stored = self._read_version(CheckpointPath(model_id=model_id, kind=kind, name=name), at)
                if stored is not None:
                    found.append(stored)
        return sorted(found, key=lambda stored: (stored.record.created_s, str(stored.path)), reverse=True)

    def find(self, path: CheckpointPath, owner: str) -> Stored:
        stored = self._newest(path) if self.run(path.model_id, owner) is not None else None
        if stored is None:
            raise NotFoundError(f"there is no checkpoint {path}")
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
    ) -> Stored:
        """Let `write` fill an empty folder, and publish it as a checkpoint.

        Raises:
            InvalidRequestError: the name is taken and `overwrite` is False.
            LimitReachedError: `limits.checkpoints` or `storage_bytes` is reached.
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
                size_bytes=0,
                user_metadata=user_metadata,
            )
            record = await in_thread(self._publish, temporary, folder, record)
        for replaced in older:
            await in_thread(_remove, replaced)
        return Stored(path=path, folder=folder, record=record)

    def _check_room(self, run: RunRecord, path: CheckpointPath, *, overwrite: bool) -> None:
        if not overwrite and self._newest(path) is not None:
            raise InvalidRequestError(
                f"name={path.name!r}: {path} exists already; overwrite it, or choose another name"
            )
        most = self._limits.storage_bytes
        if most is None:
            return
        records = [_read(folder / _RUN, RunRecord) for folder in self._runs()]
        taken = sum(
            stored.record.size_bytes
            for record in records
            if record is not None and record.owner_hash == run.owner_hash
            for stored in self.checkpoints(record.model_id)
            if stored.path != path
        )
        if taken >= most:
            raise LimitReachedError(f"limit storage_bytes: checkpoints take {taken} of {most}; delete some")

    def _make_run(self, run: RunRecord) -> None:
        folder = self._run(run.model_id)
        if not (folder / _RUN).exists():
            with suppress(FileExistsError), atomic_folder(folder) as temporary:
                _write(temporary / _RUN, run)

    def _publish(self, temporary: Path, folder: Path, record: CheckpointRecord) -> CheckpointRecord:
        size_bytes = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
        record = replace(record, size_bytes=size_bytes)
        _write(temporary / _CHECKPOINT, record)
        publish(temporary, folder)
        return record

    def delete(self, path: CheckpointPath, owner: str) -> None:
        self.find(path, owner)
        for folder in self._versions_of(path):  # oldest first, so that a kill revives none of them
            _remove(folder)

    def set_expiry(self, path: CheckpointPath, owner: str, ttl_seconds: int | None) -> Stored:
        stored = self.find(path, owner)
        expires_s = None if ttl_seconds is None else self._wall_time_s() + ttl_seconds
        record = replace(stored.record, expires_s=expires_s)
        _write(stored.folder / _CHECKPOINT, record)
        return replace(stored, record=record)

    # Folders

    def _run(self, model_id: str) -> Path:
        assert is_model_id(model_id)
        return self._root / model_id.replace(":", ".")

    def _runs(self) -> list[Path]:
        return [run for run in self._root.iterdir() if is_model_id(run.name.replace(".", ":"))]

    def _versions_of(self, path: CheckpointPath) -> list[Path]:
        """Return the versions of one checkpoint, oldest first."""
        parent = self._run(path.model_id) / FOLDERS[path.kind]
        found = [(version, folder) for name, version, folder in _versions(parent) if name == path.name]
        return [folder for _, folder in sorted(found)]

    def _newest(self, path: CheckpointPath) -> Stored | None:
        versions = self._versions_of(path)
        return self._read_version(path, versions[-1]) if versions else None

    def _read_version(self, path: CheckpointPath, folder: Path) -> Stored | None:
        record = _read(folder / _CHECKPOINT, CheckpointRecord)
        if record is None or self._has_expired(record):
            return None
        return Stored(path=path, folder=folder, record=record)

    def _has_expired(self, record: CheckpointRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._wall_time_s()


def _versions(parent: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield name, version and folder of the checkpoints in a run's `weights` or `sampler_weights`."""
    for folder in parent.iterdir() if parent.is_dir() else ():
        name, _, version = folder.name.rpartition("@")
        if version.isascii() and version.isdigit() and not name.startswith("."):
            yield name, int(version), folder


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        remove(folder)


def _remove_if_empty(run: Path) -> None:
    if not any(any((run / folder).iterdir()) for folder in FOLDERS.values() if (run / folder).is_dir()):
        _remove(run)


def _write(path: Path, record: RunRecord | CheckpointRecord) -> None:
    """Write a record so that a kill leaves the old file or the new one."""
    with atomic_write(path) as temporary, temporary.open("w") as file:
        json.dump({"format": FORMAT, **asdict(record)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return a record, or None where the file is missing or, with a warning, damaged."""
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        values["settings"] = _settings(values["settings"])
        return kind(**values)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None


def _settings(values: Mapping[str, Any]) -> ModelSettings:
    lora = values["lora"]
    return ModelSettings(base_model=values["base_model"], lora=None if lora is None else LoRASettings(**lora))
