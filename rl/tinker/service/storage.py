"""Training runs and checkpoints on the disk.

    <folder>/<model id, "." for ":">/run.json       hash of the owner's key, settings, metadata
    .../weights/<name>.json                         record of a checkpoint, which names its data
    .../weights/<name>@<random>/                    data, written by the backend
    .../sampler_weights/...                         the same for weights to sample from
    .../ledger/                                     what was trained, if ledgers are enabled

A checkpoint exists once its record does, and a record is written and replaced in one step. A kill
leaves at most data that no record names, which the next start removes; other files and folders are
left alone. An expired checkpoint is not found any more, and is removed at the next start or at a
save a minute later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import pydantic
from tinker import types as wire

from rl.observability.run_folder import LEDGER
from rl.tinker.types import (
    NOT_SAVED,
    SESSION,
    InvalidRequestError,
    LedgerMark,
    Metadata,
    ModelSettings,
    NotFoundError,
    UnsavedError,
)
from rl.utils.errors import describe_disk_error
from rl.utils.files import (
    TMP_SUFFIX,
    make_folder,
    make_temporary_folder,
    publish,
    remove_leftovers,
    replace_file,
)

log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=pydantic.BaseModel)
CheckpointPath: TypeAlias = wire.ParsedCheckpointTinkerPath
CheckpointKind = Literal["training", "sampler"]

FOLDERS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
REMOVE_EVERY_S = 60.0
"""Shortest time between two searches for expired checkpoints."""
LAST_S = 253_402_300_799
"""Last second of the year 9999, the latest that a date can be."""
_RUN = "run.json"
_MODEL_ID = re.compile(rf"{SESSION}:train:[0-9]{{1,19}}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DATA = re.compile(rf"({_NAME.pattern})@[0-9a-f]{{32}}")
_OTHER_KIND: dict[CheckpointKind, str] = {
    "training": "has weights to sample from; only those of save_state can be trained",
    "sampler": "has weights for training; save_weights_for_sampler saves those to sample from",
}


# Paths


def make_path(model_id: str, kind: CheckpointKind, name: str) -> CheckpointPath:
    """Return the path of a checkpoint.

    Example:
        >>> make_path("1f2e3d4c-0123456789abcdef:train:0", "training", "last").tinker_path
        'tinker://1f2e3d4c-0123456789abcdef:train:0/weights/last'
    """
    return CheckpointPath.from_tinker_path(f"tinker://{model_id}/{FOLDERS[kind]}/{name}")


def parse_path(path: str) -> CheckpointPath:
    """Raise InvalidRequestError for a text without the form of a path, NotFoundError if no
    checkpoint can have it.
    """
    form = re.fullmatch(rf"tinker://([^/\s]+)/(?:{'|'.join(FOLDERS.values())})/([^/]+)", path)
    if form is None:
        raise InvalidRequestError(
            f"path={path!r:.100}: must have the form tinker://<training run>/weights/<name> or "
            "tinker://<training run>/sampler_weights/<name>"
        )
    # The patterns have neither "/" nor a leading ".", so no path leaves the storage folder.
    if not _MODEL_ID.fullmatch(form[1]) or not _NAME.fullmatch(form[2]):
        raise NotFoundError(f"there is no checkpoint {path!r:.100}")
    return CheckpointPath.from_tinker_path(path)


def check_name(name: str) -> None:
    """Raise InvalidRequestError unless the text can name a checkpoint."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"name={name!r:.100}: must have 1 to 128 letters, digits, '_', '-' and '.', and begin "
            "with a letter, a digit or '_'"
        )


# Records


Seconds = Annotated[float, pydantic.Field(ge=0, le=LAST_S)]


class _Record(pydantic.BaseModel):
    """Content of a file; times are Unix seconds."""

    model_config = pydantic.ConfigDict(frozen=True, protected_namespaces=())

    settings: ModelSettings
    created_s: Seconds
    user_metadata: Metadata | None


class RunRecord(_Record):
    format: Literal[1] = 1
    model_id: Annotated[str, pydantic.Field(pattern=f"^{_MODEL_ID.pattern}$")]
    owner_hash: str


class CheckpointRecord(_Record):
    format: Literal[2] = 2
    folder: Annotated[str, pydantic.Field(pattern=f"^{_DATA.pattern}$")]
    """Name of the folder beside the record that has the data."""
    expires_s: Seconds | None
    size_bytes: Annotated[int, pydantic.Field(ge=0, lt=2**63)]
    ledger: LedgerMark | None = None
    """Step of the run's ledger after which it was saved; None without a ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A checkpoint on the disk."""

    path: CheckpointPath
    record: CheckpointRecord
    data: Path
    """Folder that the backend wrote."""


class Storage:
    """Checkpoints of all owners. Only the event loop's thread changes records, which are small;
    lists may be read in others."""

    def __init__(self, folder: str | Path, *, wall_time_s: Callable[[], float]) -> None:
        self._root = Path(folder).absolute()
        self._wall_time_s = wall_time_s
        self._removed_s = -math.inf
        """Unix time of the last search for expired checkpoints."""

    async def prepare(self) -> None:
        """Create the folder, and remove expired checkpoints, data without a record, and runs
        without files.
        """
        make_folder(self._root, "the storage folder")
        await self._remove_expired(self._find_expired())
        for run in self._list_runs():
            for folder in FOLDERS.values():
                remove_leftovers(run / folder)
                for data in (run / folder).glob("[!.]*/"):
                    form = _DATA.fullmatch(data.name)
                    if (
                        form is None
                    ):  # It may be data of a later version, and is not ours to remove.
                        log.warning("%s is ignored: it is not of this version of the server", data)
                        continue
                    file = data.with_name(f"{form[1]}.json")
                    record = _read(file, CheckpointRecord)
                    # Data of a damaged record are kept.
                    if not file.exists() or (record is not None and record.folder != data.name):
                        shutil.rmtree(data, ignore_errors=True)
            ledger = run / LEDGER
            # A kill leaves at most a part of one file.
            for part in ledger.glob(f"*{TMP_SUFFIX}"):
                part.unlink(missing_ok=True)
            # A run without checkpoints has nothing that a client could ask for, and its ledger
            # proves nothing about weights that exist.
            files = [one for one in run.rglob("*") if one.is_file() and one.parent != ledger]
            if not any(one != run / _RUN for one in files):
                shutil.rmtree(run, ignore_errors=True)

    async def _remove_expired(self, files: Iterable[Path]) -> None:
        for file in files:
            record = _read(file, CheckpointRecord)  # it may have got more time meanwhile
            if record is not None and self._has_expired(record):
                try:
                    await _remove(file, record)
                except OSError:
                    log.exception("%s has expired and cannot be removed", file)

    def _find_expired(self) -> list[Path]:
        """Return the records that have expired."""
        self._removed_s = self._wall_time_s()
        expired = []
        for run in self._list_runs():
            for file in _list_records(run):
                record = _read(file, CheckpointRecord)
                if record is not None and self._has_expired(record):
                    expired.append(file)
        return expired

    # Reading

    def list_runs(self, owner: str) -> list[RunRecord]:
        """Return the records of an owner's runs, in no order."""
        records = [self._read_run(run) for run in self._list_runs()]
        return [record for record in records if record is not None and record.owner_hash == owner]

    def find_run(self, model_id: str, owner: str) -> RunRecord | None:
        """Return the record of an owner's run, or None; another owner's is not found."""
        record = (
            self._read_run(self._get_folder(model_id)) if _MODEL_ID.fullmatch(model_id) else None
        )
        return record if record is not None and record.owner_hash == owner else None

    def list_checkpoints(self, *model_ids: str) -> list[Stored]:
        """Return the checkpoints of some runs, of both kinds, newest first."""
        checkpoints = []
        for model_id in model_ids:
            for file in _list_records(self._get_folder(model_id)):
                path = f"tinker://{model_id}/{file.parent.name}/{file.stem}"
                stored = self._read_stored(CheckpointPath.from_tinker_path(path))
                if stored is not None:
                    checkpoints.append(stored)
        # The path decides between checkpoints of one clock tick, so that pages of a list agree.
        return sorted(
            checkpoints, key=lambda one: (one.record.created_s, one.path.tinker_path), reverse=True
        )

    def find(self, path: CheckpointPath, owner: str) -> Stored:
        """Return an owner's checkpoint; raise NotFoundError if there is none."""
        # The run says who owns its checkpoints.
        run = self.find_run(path.training_run_id, owner)
        stored = None if run is None else self._read_stored(path)
        if stored is None:
            raise NotFoundError(f"there is no checkpoint {path.tinker_path}")
        return stored

    def find_weights(
        self, path: str, kind: CheckpointKind, owner: str, *, base_model: str | None
    ) -> Stored:
        """Find the checkpoint at a path, which must be of this kind and, unless None, of this base
        model.
        """
        parsed = parse_path(path)
        if parsed.checkpoint_type != kind:
            raise InvalidRequestError(f"path={path}: {_OTHER_KIND[kind]}")
        stored = self.find(parsed, owner)
        saved_model = stored.record.settings.base_model
        if base_model not in (None, saved_model):
            raise InvalidRequestError(
                f"base_model={base_model!r}: must be {saved_model!r}, as in {path}"
            )
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
        ledger: LedgerMark | None = None,
    ) -> None:
        """Let `write` fill an empty folder, and publish it as a checkpoint.

        Raises:
            InvalidRequestError: the name is taken.
            UnsavedError: the disk is full, or refuses the checkpoint for another reason.
        """
        if self._wall_time_s() >= self._removed_s + REMOVE_EVERY_S:
            await self._remove_expired(await asyncio.to_thread(self._find_expired))
        file = self._get_file(path)
        if not overwrite and self._read_stored(path) is not None:
            raise InvalidRequestError(
                f"name={file.stem!r}: {path.tinker_path} exists already; overwrite it, or choose "
                "another name"
            )

        def describe(folder: Path, name: str) -> CheckpointRecord:
            now_s = self._wall_time_s()
            return CheckpointRecord(
                settings=run.settings,
                created_s=now_s,
                expires_s=None if ttl_seconds is None else now_s + ttl_seconds,
                size_bytes=sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()),
                user_metadata=user_metadata,
                folder=name,
                ledger=ledger,
            )

        with _translate_disk_errors(NOT_SAVED):
            file.parent.mkdir(parents=True, exist_ok=True)
            # The first checkpoint makes the run one that is listed after a restart.
            if not (self._get_folder(run.model_id) / _RUN).exists():
                _write(self._get_folder(run.model_id) / _RUN, run)
            await self._replace(file, write, describe)

    async def _replace(
        self,
        file: Path,
        write: Callable[[Path], Awaitable[None]],
        describe: Callable[[Path, str], CheckpointRecord],
    ) -> None:
        """Publish what `write` writes, let the record name it, and remove what the record named
        before.
        """
        # Each save has a folder of its own: the old data stay readable until the record names the
        # new ones.
        data = file.with_name(f"{file.stem}@{uuid.uuid4().hex}")
        with make_temporary_folder(data) as temporary:
            await write(temporary)
            record = describe(temporary, data.name)
            # Flushing the data to the disk takes long.
            await _run_in_thread(publish, temporary, data)
        older = _read(file, CheckpointRecord)
        try:
            _write(file, record)
        except OSError:
            # Without a record nobody would find the data before the next start removes them.
            await _run_in_thread(shutil.rmtree, data, True)
            raise
        if older is not None:
            await _run_in_thread(shutil.rmtree, file.with_name(older.folder), True)

    async def delete(self, path: CheckpointPath, owner: str) -> None:
        """Delete an owner's checkpoint; raise NotFoundError or UnsavedError."""
        record = self.find(path, owner).record
        with _translate_disk_errors("the checkpoint was not deleted"):
            await _remove(self._get_file(path), record)

    def set_expiry(self, path: CheckpointPath, owner: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire after some seconds from now, or never (None)."""
        expires_s = None if ttl_seconds is None else self._wall_time_s() + ttl_seconds
        record = self.find(path, owner).record.model_copy(update={"expires_s": expires_s})
        with _translate_disk_errors("the checkpoint's expiry was not changed"):
            _write(self._get_file(path), record)

    # Files

    def get_ledger(self, model_id: str) -> Path:
        """Return the folder of a run's ledger, which may not exist."""
        return self._get_folder(model_id) / LEDGER

    def _get_folder(self, model_id: str) -> Path:
        assert _MODEL_ID.fullmatch(model_id)
        return self._root / model_id.replace(":", ".")

    def _read_run(self, run: Path) -> RunRecord | None:
        """Return the record of a run's folder, unless it is that of another run."""
        record = _read(run / _RUN, RunRecord)
        return record if record is not None and self._get_folder(record.model_id) == run else None

    def _list_runs(self) -> list[Path]:
        return [
            run for run in self._root.iterdir() if _MODEL_ID.fullmatch(run.name.replace(".", ":"))
        ]

    def _get_file(self, path: CheckpointPath) -> Path:
        return self._get_folder(path.training_run_id) / f"{path.checkpoint_id}.json"

    def _read_stored(self, path: CheckpointPath) -> Stored | None:
        file = self._get_file(path)
        record = _read(file, CheckpointRecord)
        if record is None or self._has_expired(record):
            return None
        return Stored(path=path, record=record, data=file.with_name(record.folder))

    def _has_expired(self, record: CheckpointRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._wall_time_s()


def _list_records(run: Path) -> list[Path]:
    files: list[Path] = []
    for folder in FOLDERS.values():
        files += (run / folder).glob("*.json")
    return files


@contextmanager
def _translate_disk_errors(what: str) -> Iterator[None]:
    """Tell the client `what` did not happen, with the system's reason."""
    try:
        yield
    except OSError as error:
        raise UnsavedError(describe_disk_error(error), what=what) from error


async def _remove(file: Path, record: CheckpointRecord) -> None:
    # First the record: after a kill between the two, the next start removes data without one.
    file.unlink()
    await _run_in_thread(shutil.rmtree, file.with_name(record.folder), True)


async def _run_in_thread(function: Callable[..., object], *args: object) -> None:
    """Run a function in a thread. When cancelled, wait for it nevertheless: its files must not be
    removed meanwhile.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _write(path: Path, record: _Record) -> None:
    """Write a record so that a kill leaves the old file or the new one."""
    with replace_file(path) as temporary, temporary.open("w") as file:
        file.write(record.model_dump_json(indent=2))
        file.flush()
        # Before the rename, or a crash of the machine may leave an empty record.
        os.fsync(file.fileno())


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return a record, or None where the file is missing or, with a warning, damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, pydantic.ValidationError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None
