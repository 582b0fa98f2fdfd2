"""Folder of one run: its files and its lock.

    outputs/<name>/
        config.json  metrics.jsonl  rollouts.jsonl  learning_curve.png  events.jsonl  environment.json
        status.json  timeline.json  report.html
        logs/  checkpoints/  and of enabled sinks tensorboard/  wandb/

The run holds a lock on `.lock`, which the kernel releases when the process ends. `status.json` says whether the
run finished. A run that continues from a checkpoint first truncates its records to the checkpoint (`cut_back`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Literal

from filelock import FileLock

from rl.types import LoopPosition
from rl.utils.errors import writing
from rl.utils.files import (
    LOCK,
    TMP_SUFFIX,
    atomic_write,
    folder_errors,
    lock_folder,
    make_folder,
    previous_file,
    remove_empty,
)

STATUS = "status.json"
AS_WHAT = "a run's folder"
EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
REPORT = "report.html"
TIMELINE = "timeline.json"
METRICS = "metrics.jsonl"
ROLLOUTS = ("rollouts.jsonl", "rollouts.1.jsonl")
BEFORE = ".before"
"""Suffix of the records of a run that had to start again from the beginning."""
OWN_FILES = (
    "config.json",
    METRICS,
    "learning_curve.png",
    *ROLLOUTS,
    *(f"{name}{BEFORE}.jsonl" for name in ("metrics", "rollouts", "rollouts.1")),
    "pass_rates.jsonl",
    EVENTS,
    ENVIRONMENT,
    REPORT,
    TIMELINE,
    STATUS,
)
PARTIAL_FILES = tuple(f"{name}{TMP_SUFFIX}" for name in OWN_FILES)
"""Temporary files of a process that was killed while it wrote; the next run removes them."""
OWN_FOLDERS = ("logs", "checkpoints")
TENSORBOARD = "tensorboard"
SINK_FOLDERS = (TENSORBOARD, "wandb")
"""Folders of sinks."""
WEIGHTS = "weights"
"""Folder of weights that are published as files; removed at a regular end of the run."""
FAILURE_FILES = ("nan_batch_*.npz", "collectives_rank*")
"""Files of a trainer that failed: the batch of a loss that is not finite, and the latest collectives of each rank."""

logger = logging.getLogger(__name__)


class RunFolder:
    """Folder of a run, locked by this process until it is closed; a context manager.

    Closing does not mark the run as finished.
    """

    def __init__(
        self, path: Path, *, checkpoints: Path | None, lock: FileLock | None, created: Path | None
    ) -> None:
        """Use `RunFolder.create`. `created` is the topmost folder that did not exist before."""
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = checkpoints or path / "checkpoints"
        self.config_json = path / "config.json"
        self.metrics = path / METRICS
        self.rollouts = path / ROLLOUTS[0]
        self.events = path / EVENTS
        self.environment = path / ENVIRONMENT
        self.learning_curve = path / "learning_curve.png"
        self.timeline = path / TIMELINE
        self._lock = lock
        self._created = created

    @classmethod
    def create(
        cls,
        dump_folder: str | Path,
        name: str,
        *,
        time_stamp: bool = False,
        overwrite: bool = False,
        inputs: Mapping[str, Path] | None = None,
        checkpoints: Path | None = None,
        wall_clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> RunFolder:
        """Make and lock `dump_folder/name`.

        Args:
            time_stamp: add `-YYYYmmdd-HHMMSS` to the name, and `-2` and so on if that folder exists.
            inputs: files and folders that the run reads, by config field.
            checkpoints: another folder for checkpoints, which is neither made nor cleared.
            wall_clock: local time for the name.

        Raises:
            ValueError: the folder cannot be made, is not a run's, is in use, or holds a run and `overwrite` is
                false; or an input lies in the folder that would be replaced. Nothing is left behind.
        """
        if time_stamp:
            name = f"{name}-{wall_clock():%Y%m%d-%H%M%S}"
            names = chain((name,), (f"{name}-{number}" for number in count(2)))
            name = next(free for free in names if not os.path.lexists(Path(dump_folder).expanduser() / free))
        if not name or name in (".", "..") or Path(name).name != name:
            raise ValueError(f"name={name!r} is not a folder name")
        path = Path(dump_folder).expanduser().absolute() / name
        created = make_folder(path, AS_WHAT)
        _refuse_foreign(path)
        lock: FileLock | None = None
        try:
            lock = lock_folder(path, as_what=AS_WHAT, otherwise="choose another name")
            check_free(path, overwrite=overwrite)
            _refuse_inputs(path, inputs or {})
            with folder_errors(path, AS_WHAT):
                _clear(path)
                for folder in OWN_FOLDERS if checkpoints is None else OWN_FOLDERS[:1]:
                    (path / folder).mkdir()
                _write_status(path, "running")
        except BaseException:
            if created is not None:
                _remove(path, topmost=created)
            if lock is not None:
                lock.release()
            raise
        return cls(path, checkpoints=checkpoints, lock=lock, created=created)

    @classmethod
    def resume(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Lock the folder of a run that has ended, to continue the run after `reopen`.

        Raises:
            ValueError: the folder is not a run's, or the run is still going on.
        """
        folder = cls.to_read(path, checkpoints=checkpoints)
        folder._lock = lock_folder(
            path, as_what=AS_WHAT, otherwise="only a run that has ended can be resumed"
        )
        return folder

    @classmethod
    def to_read(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Open the folder for reading, without its lock.

        Raises:
            ValueError: the folder is not a run's.
        """
        if not path.is_dir() or read_status(path) is None:
            raise ValueError(f"{path} is not the folder of a run: it has no {STATUS}")
        return cls(path, checkpoints=checkpoints, lock=None, created=None)

    @property
    def is_finished(self) -> bool:
        return read_status(self.path) == "finished"

    def reopen(self) -> None:
        """Mark the run as running again, and remove temporary files of its last process."""
        for name in PARTIAL_FILES:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / WEIGHTS, ignore_errors=True)
        with folder_errors(self.path, AS_WHAT):
            for folder in OWN_FOLDERS:
                if folder == self.logs.name or self.checkpoints.parent == self.path:
                    (self.path / folder).mkdir(exist_ok=True)
            _write_status(self.path, "running")

    def mark_finished(self) -> None:
        """Mark the run as finished.

        Raises:
            UnwrittenError: status.json cannot be written, so the run still counts as unfinished.
        """
        with writing(self.path / STATUS):
            _write_status(self.path, "finished")

    def discard(self) -> None:
        """Undo `create`, for a run that was refused before it began."""
        if self._created is not None:
            _remove(self.path, topmost=self._created)
        else:
            _clear(self.path)
            (self.path / LOCK).unlink()
        self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise the ValueError that `RunFolder.create` would raise for an existing folder."""
    if not path.is_dir():
        return
    _refuse_foreign(path)
    status = read_status(path)
    if status == "finished" and not overwrite:
        raise ValueError(f"{path} holds a finished run; choose another name, or --overwrite to replace it")
    if status == "running" and not overwrite:
        raise ValueError(
            f"{path} holds an unfinished run (it failed or was killed); continue it with --resume {path}, "
            "choose another name, or --overwrite to replace it"
        )


def read_status(path: Path) -> Literal["running", "finished"] | None:
    """Return the status of a run, "running" also if it was killed; None without status.json."""
    try:
        content = json.loads((path / STATUS).read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # cut short by the end of its process
        return "running"
    return "finished" if content.get("status") == "finished" else "running"


def _refuse_foreign(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if names and not names & {LOCK, STATUS}:
        raise ValueError(f"{path} exists and is not a run's folder; choose another name")


def _refuse_inputs(path: Path, inputs: Mapping[str, Path]) -> None:
    """Refuse inputs, or their link targets, inside the folder that would be cleared."""
    for field, given in inputs.items():
        file = Path(os.path.abspath(given.expanduser()))
        links = [entry for entry in file.iterdir() if entry.is_symlink()] if file.is_dir() else []
        for entry in (file, *links):
            if entry.is_relative_to(path) or entry.resolve().is_relative_to(path.resolve()):
                raise ValueError(
                    f"{field}={str(given)!r} lies in the folder of the run that --overwrite would replace, "
                    f"{path}; choose another name"
                )


def _clear(path: Path) -> None:
    """Remove the files that runs write, and no others."""
    failures = [file.name for pattern in FAILURE_FILES for file in path.glob(pattern)]
    for name in (*OWN_FOLDERS, *SINK_FOLDERS, *OWN_FILES, *PARTIAL_FILES, *failures):
        target = path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            with contextlib.suppress(FileNotFoundError):
                target.unlink()


def _remove(path: Path, *, topmost: Path) -> None:
    """Remove a run's folder, and its empty parents up to `topmost`."""
    shutil.rmtree(path)
    remove_empty(path.parent, topmost=topmost)


def _write_status(path: Path, status: Literal["running", "finished"]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with atomic_write(path / STATUS) as file:
        file.write_text(json.dumps({"status": status, "since": now, "pid": os.getpid()}) + "\n")


def cut_back(*, metrics: Path, rollouts: Path, position: LoopPosition | None, keep_old: bool = False) -> None:
    """Truncate a run's records to the checkpoint that the run continues from.

    Lines of later steps are removed, since those steps are repeated; so are evaluations that the checkpoint does
    not include, an unfinished last line, and lines that are not JSON. A file is replaced by one rename, or unchanged.

    Args:
        metrics: path of metrics.jsonl.
        rollouts: path of rollouts.jsonl; rollouts.1.jsonl is truncated too.
        position: position of the checkpoint; None if the run starts from the beginning.
        keep_old: rename files without kept lines, such as to metrics.before.jsonl, instead of removing them.

    Raises:
        UnwrittenError: the disk has no room for the kept lines; the file is unchanged.
    """
    num_kept = [
        _cut(file, position, keep_old=keep_old) for file in (metrics, previous_file(rollouts), rollouts)
    ]
    if position is not None and num_kept[0] < position.num_records:
        logger.warning(
            "%s has %d lines up to step %d, but %d were written: some are lost",
            metrics, num_kept[0], position.step, position.num_records,
        )  # fmt: skip


def _cut(file: Path, position: LoopPosition | None, *, keep_old: bool) -> int:
    """Return the number of kept lines; a file without any is removed, or moved to `kept_aside`."""
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        kept = [_is_kept(line, position) for line in lines]
    with writing(file):
        if any(kept) and not all(kept):
            logger.info("%s: removed %d lines of steps that are repeated", file.name, kept.count(False))
            with atomic_write(file) as new, file.open("rb") as lines, new.open("wb") as shorter:
                shorter.writelines(line for line, is_kept in zip(lines, kept, strict=True) if is_kept)
                shorter.flush()
                os.fsync(shorter.fileno())
        elif not any(kept) and keep_old:
            file.replace(file.with_name(f"{file.stem}{BEFORE}{file.suffix}"))
        elif not any(kept):
            file.unlink()
    return sum(kept)


def _is_kept(line: bytes, position: LoopPosition | None) -> bool:
    """Return whether a line of metrics or rollouts belongs to the checkpoint."""
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
        step, kind = int(record["step"]), str(record.get("kind", ""))
    except (ValueError, KeyError, TypeError):
        logger.warning("removed a damaged line: %.80r", line)
        return False
    is_evaluation = kind.startswith("eval") or any(name.startswith("eval/") for name in record)
    if position is None or step > position.step:
        return False
    return step < position.step or position.evaluated or not is_evaluation
