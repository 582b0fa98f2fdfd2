"""Training runs and checkpoints on the disk.

    <folder>/<model id, "." for ":">/run.json                       whose it is (a hash), settings, metadata
    .../weights/<name>@<version>/checkpoint.json, data/             `data` is the backend's own
    .../sampler_weights/<name>@<version>/checkpoint.json, data/

A checkpoint appears whole or not at all. One that replaces another has the next version: the newest is the
one, and older ones, which a kill may have left, go with the next start. So at every moment the old one or
the new one is there. What expired is not found any more, and removed by `sweep`. What somebody reads
(`reading`) is removed when they have finished.

Nothing is kept in memory but who reads, so that several processes may share a folder; only that one of them
removes what another reads is not prevented.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rl.atomic_folder import appearing_folder, publish, temporary_folder
from rl.tinker.errors import InvalidRequestError, LimitReachedError, NotFoundError
from rl.tinker.service.background import in_thread
from rl.tinker.service.limits import Limits
from rl.tinker.service.names import FOLDERS, CheckpointPath, is_model_id, owner_hash
from rl.tinker.service.responses import Checkpoint, Metadata
from rl.tinker.service.run_files import CheckpointRecord, RunRecord, read_checkpoint, read_run, write_json
from rl.tinker.service.run_folders import RunFolders

_RUN, _CHECKPOINT, _DATA = "run.json", "checkpoint.json", "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One version of a checkpoint."""

    path: CheckpointPath
    folder: Path
    record: CheckpointRecord

    def described(self) -> Checkpoint:
        expires_s = self.record.expires_s
        return Checkpoint(
            path=str(self.path),
            checkpoint_id=self.path.checkpoint_id,
            kind=self.path.kind,
            settings=self.record.settings,
            created=datetime.fromtimestamp(self.record.created_s, UTC),
            size_bytes=self.record.size_bytes,
            expires=None if expires_s is None else datetime.fromtimestamp(expires_s, UTC),
            user_metadata=self.record.user_metadata,
        )


class Storage:
    """Everything but `save` is quick on a local disk, or says that it is for a thread."""

    def __init__(self, folder: str | Path, *, limits: Limits, wall_time_s: Callable[[], float]) -> None:
        self._folders = RunFolders(Path(folder).absolute())
        self._limits = limits
        self._wall_time_s = wall_time_s
        self._expires_next_s = math.inf

    def prepare(self) -> None:
        """Make the folder, and remove what was left half written, replaced or has expired.

        Raises:
            ValueError: it cannot be written.
        """
        self._folders.prepare()
        self.sweep()
        for run in self._folders.runs():
            self._folders.remove_if_empty(run)

    def sweep(self) -> None:
        """For a thread: remove what has expired or was replaced."""
        self._expires_next_s = math.inf
        for run in self._folders.runs():
            for kind in FOLDERS:
                newest: dict[str, Path] = {}
                for name, _, folder in sorted(self._folders.versions(run / FOLDERS[kind])):
                    if (older := newest.get(name)) is not None:
                        self._folders.remove(older)
                    newest[name] = folder
                for folder in newest.values():
                    record = read_checkpoint(folder / _CHECKPOINT)
                    if record is not None and self._has_expired(record):
                        self._folders.remove(folder)
                    elif record is not None:
                        self._expect(record)

    def has_expired(self) -> bool:
        """Something that this process knows of, so that it is worth a `sweep`."""
        return self._expires_next_s <= self._wall_time_s()

    def _expect(self, record: CheckpointRecord) -> None:
        if record.expires_s is not None:
            self._expires_next_s = min(self._expires_next_s, record.expires_s)

    # Reading

    def runs(self, owner: str) -> list[RunRecord]:
        """For a thread: the newest first."""
        records = [read_run(run / _RUN) for run in self._folders.runs()]
        own = [record for record in records if record is not None and record.owner_hash == owner_hash(owner)]
        return sorted(own, key=lambda record: record.created_s, reverse=True)

    def run(self, model_id: str, owner: str) -> RunRecord | None:
        record = read_run(self._folders.run(model_id) / _RUN) if is_model_id(model_id) else None
        return record if record is not None and record.owner_hash == owner_hash(owner) else None

    def checkpoints(self, model_id: str) -> list[Stored]:
        """For a thread: of both kinds, the newest first."""
        run = self._folders.run(model_id)
        found = []
        for kind, folder in FOLDERS.items():
            newest: dict[str, tuple[int, Path]] = {}
            for name, version, at in self._folders.versions(run / folder):
                newest[name] = max(newest.get(name, (0, at)), (version, at))
            for name, (_, at) in newest.items():
                stored = self._read(CheckpointPath(model_id=model_id, kind=kind, name=name), at)
                if stored is not None:
                    found.append(stored)
        return sorted(found, key=lambda stored: (stored.record.created_s, str(stored.path)), reverse=True)

    def find(self, path: CheckpointPath, owner: str) -> Stored:
        stored = self._newest(path) if self.run(path.model_id, owner) is not None else None
        if stored is None:
            raise NotFoundError(f"there is no checkpoint {path}")
        return stored

    @contextmanager
    def reading(self, stored: Stored) -> Iterator[Path]:
        """What the backend wrote, which stays as long as the block lasts.

        Raises:
            GoneError: it was deleted or replaced.
        """
        with self._folders.reading(stored.folder):
            yield stored.folder / _DATA

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
        """Let `write` fill an empty folder, which becomes the checkpoint.

        Raises:
            InvalidRequestError: there is one of that name, and not `overwrite`.
            LimitReachedError: `limits.checkpoints` or `storage_bytes`.
        """
        await in_thread(self._check_room, run, path, overwrite=overwrite)
        await in_thread(self._make_run, run)
        older = self._folders.versions_of(path)
        version = self._folders.next_version(path)
        folder = self._folders.run(path.model_id) / FOLDERS[path.kind] / f"{path.name}@{version}"
        folder.parent.mkdir(exist_ok=True)
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
        for _, replaced in older:
            await in_thread(self._folders.remove, replaced)
        return Stored(path=path, folder=folder, record=record)

    def _check_room(self, run: RunRecord, path: CheckpointPath, *, overwrite: bool) -> None:
        if not overwrite and self._newest(path) is not None:
            raise InvalidRequestError(
                f"name is {path.name!r}: {path} is there already; overwrite it, or take another name"
            )
        own = [read_run(folder / _RUN) for folder in self._folders.runs()]
        sizes = [
            stored.record.size_bytes
            for record in own
            if record is not None and record.owner_hash == run.owner_hash
            for stored in self.checkpoints(record.model_id)
            if stored.path != path
        ]
        if len(sizes) >= self._limits.checkpoints:
            raise LimitReachedError(f"limit checkpoints: there are {len(sizes)}; delete some")
        if self._limits.storage_bytes is not None and sum(sizes) >= self._limits.storage_bytes:
            raise LimitReachedError(
                f"limit storage_bytes: checkpoints take {sum(sizes)} of {self._limits.storage_bytes}; "
                "delete some"
            )

    def _make_run(self, run: RunRecord) -> None:
        folder = self._folders.run(run.model_id)
        if not (folder / _RUN).exists():
            with suppress(FileExistsError), appearing_folder(folder) as temporary:
                write_json(temporary / _RUN, run)

    def _publish(self, temporary: Path, folder: Path, record: CheckpointRecord) -> CheckpointRecord:
        size_bytes = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
        record = replace(record, size_bytes=size_bytes)
        write_json(temporary / _CHECKPOINT, record)
        publish(temporary, folder)
        self._expect(record)
        return record

    def delete(self, path: CheckpointPath, owner: str) -> None:
        """For a thread."""
        self.find(path, owner)
        for _, folder in self._folders.versions_of(
            path
        ):  # the oldest first: killed on the way, none comes back
            self._folders.remove(folder)

    def set_expiry(self, path: CheckpointPath, owner: str, ttl_seconds: int | None) -> Stored:
        """For a thread."""
        stored = self.find(path, owner)
        expires_s = None if ttl_seconds is None else self._wall_time_s() + ttl_seconds
        record = replace(stored.record, expires_s=expires_s)
        write_json(stored.folder / _CHECKPOINT, record)
        self._expect(record)
        return replace(stored, record=record)

    def remove_empty_run(self, model_id: str) -> None:
        """For a thread: what a run that saved nothing has left."""
        self._folders.remove_if_empty(self._folders.run(model_id))

    def _newest(self, path: CheckpointPath) -> Stored | None:
        versions = self._folders.versions_of(path)
        return self._read(path, versions[-1][1]) if versions else None

    def _read(self, path: CheckpointPath, folder: Path) -> Stored | None:
        record = read_checkpoint(folder / _CHECKPOINT)
        if record is None or self._has_expired(record):
            return None
        return Stored(path=path, folder=folder, record=record)

    def _has_expired(self, record: CheckpointRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._wall_time_s()
