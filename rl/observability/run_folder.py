"""Folder of one run: its files and its lock.

    outputs/<name>/
        config.json  defaults.json  metrics.jsonl  rollouts.jsonl  learning_curve.png  events.jsonl
        environment.json status.json  and, made on request, timeline.json  report.html logs/
        checkpoints/  and of enabled sinks tensorboard/  wandb/

The run holds a lock on `.lock`, which the kernel releases when the process ends. `status.json` says
whether the run finished. A run that continues from a checkpoint first truncates its records to the
checkpoint (`cut_back`).
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from filelock import FileLock

from rl.observability.run_files import (
    AS_WHAT,
    CONFIG,
    DEFAULTS,
    ENVIRONMENT,
    EVENTS,
    LOGS,
    METRICS,
    OLD_SUFFIX,
    OWN_FOLDERS,
    ROLLOUTS,
    SINK_FOLDERS,
    STATUS,
    WEIGHTS,
    files_of_runs,
    is_run,
    is_unused,
    read_status,
    refuse_special_files,
    remove_versions,
)
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
)

logger = logging.getLogger(__name__)


class RunFolder:
    """Folder of a run, locked by this process until it is closed; a context manager.

    Closing does not mark the run as finished.
    """

    def __init__(
        self, path: Path, *, checkpoints: Path | None = None, is_new: bool = False
    ) -> None:
        """Use `RunFolder.create`. `is_new` is True if the folder did not exist before."""
        self.path = path
        self.logs = path / LOGS
        self.checkpoints = checkpoints or path / "checkpoints"
        self.config_json = path / CONFIG
        self.defaults_json = path / DEFAULTS
        self.metrics = path / METRICS
        self.rollouts = path / ROLLOUTS[0]
        self.events = path / EVENTS
        self.environment = path / ENVIRONMENT
        self.learning_curve = path / "learning_curve.png"
        self._lock: FileLock | None = None
        self._is_new = is_new

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
            time_stamp: add `-YYYYmmdd-HHMMSS` to the name, and `-2` and so on if that folder
                exists.
            inputs: files and folders that the run reads, by config field.
            checkpoints: another folder for checkpoints, which is neither made nor cleared.
            wall_clock: local time for the name.

        Raises:
            ValueError: the folder cannot be made, holds something and is not a run's, is in use, or
                holds a run and `overwrite` is false; or an input lies in the folder that would be
                replaced. Nothing is left behind.
        """
        if time_stamp:
            name = f"{name}-{wall_clock():%Y%m%d-%H%M%S}"
        if not name or name in (".", "..") or Path(name).name != name:
            raise ValueError(f"name={name!r} is not a folder name")
        path = Path(dump_folder).expanduser().absolute() / name
        is_new = _make_new(path)
        if time_stamp and not is_new:
            others = (path.with_name(f"{name}-{number}") for number in count(2))
            path, is_new = next(other for other in others if _make_new(other)), True
        make_folder(path, AS_WHAT)
        _refuse_foreign(path)
        folder = cls(path, checkpoints=checkpoints, is_new=is_new)
        try:
            folder._lock = lock_folder(path, as_what=AS_WHAT, otherwise="choose another name")
            check_free(path, overwrite=overwrite)
            _refuse_inputs(path, inputs or {})
            with folder_errors(path, AS_WHAT):
                if overwrite:
                    _clear(path)
                folder._start()
        except BaseException:
            folder._close_and_remove()
            raise
        return folder

    @classmethod
    def resume(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Lock the folder, to continue its run after `reopen`; raises ValueError unless a run of it
        has ended.
        """
        folder = cls.to_read(path, checkpoints=checkpoints)
        folder._lock = lock_folder(
            path, as_what=AS_WHAT, otherwise="only a run that has ended can be resumed"
        )
        return folder

    @classmethod
    def to_read(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Open the folder for reading, without its lock.

        Raises ValueError if it is not a run's, or has links, pipes or devices in place of files.
        """
        if path.is_dir():
            refuse_special_files(path)
        if not path.is_dir() or read_status(path) is None:
            raise ValueError(f"{path} is not the folder of a run: it has no {STATUS}")
        return cls(path, checkpoints=checkpoints)

    @property
    def is_finished(self) -> bool:
        return read_status(self.path) == "finished"

    def reopen(self) -> None:
        """Mark the run as running again, and remove temporary files of its last process."""
        for file in files_of_runs(self.path, suffixes=(TMP_SUFFIX,)):
            file.unlink(missing_ok=True)
        remove_versions(self.path / WEIGHTS)
        with folder_errors(self.path, AS_WHAT):
            self._start()

    def _start(self) -> None:
        for folder in (self.logs, self.checkpoints):
            if folder.parent == self.path:  # other folders for checkpoints are made by the trainer
                folder.mkdir(exist_ok=True)
        _write_status(self.path, "running")

    def mark_finished(self) -> None:
        """Mark the run as finished; after an UnwrittenError it still counts as unfinished."""
        with writing(self.path / STATUS):
            _write_status(self.path, "finished")

    def discard(self) -> None:
        """Undo `create`, for a run that was refused before it began."""
        if not self._is_new:
            _clear(self.path)
            (self.path / LOCK).unlink()
        self._close_and_remove()

    def _close_and_remove(self) -> None:
        """Release the lock, and remove a folder that is new."""
        # A new folder without a lock may have been locked by another run first.
        is_own = self._is_new and self._lock is not None
        if is_own:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        if is_own:
            # NFS keeps the name of a file that is open, here the lock, so its folder was not empty
            # until now.
            with suppress(OSError):
                self.path.rmdir()

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
    if status is None:
        return
    if not overwrite:
        raise ValueError(f"{path} holds {_describe_run(path, status)} or --overwrite to replace it")
    if (
        path.is_symlink()
        and (path.parent / path.readlink()).parent.resolve() == path.parent.resolve()
    ):
        raise ValueError(
            f"{path} is a link to the folder of another run, {path.resolve()}, which --overwrite "
            "would replace; give the name of that folder, or choose another name"
        )


def _describe_run(path: Path, status: Literal["running", "finished"]) -> str:
    if status == "finished":
        return "a finished run; choose another name,"
    if not (path / CONFIG).exists():
        return f"an unfinished run without {CONFIG}; choose another name,"
    return (
        f"an unfinished run (it failed or was killed); continue it with --resume {path}, "
        "choose another name,"
    )


def _make_new(path: Path) -> bool:
    """Make a folder and its parents; return False if the path exists already."""
    with folder_errors(path, AS_WHAT):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            return False
    return True


def _refuse_foreign(path: Path) -> None:
    """Refuse a folder that holds something and is not a run's: no file of a person is replaced or
    among a run's.
    """
    if not is_run(path) and not is_unused(path):
        raise ValueError(f"{path} exists and is not a run's folder; choose another name")


def _refuse_inputs(path: Path, inputs: Mapping[str, Path]) -> None:
    """Refuse inputs inside the folder that would be cleared."""
    for field, given in inputs.items():
        if given.expanduser().resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{field}={str(given)!r} lies in the folder of the run that --overwrite would "
                f"replace, {path}; choose another name"
            )


def _clear(path: Path) -> None:
    """Remove the files and folders that runs write, and no others."""
    folders = [path / name for name in (*OWN_FOLDERS, *SINK_FOLDERS)]
    for target in (*folders, *files_of_runs(path, suffixes=("", TMP_SUFFIX))):
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _write_status(path: Path, status: Literal["running", "finished"]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with atomic_write(path / STATUS) as file:
        file.write_text(json.dumps({"status": status, "since": now, "pid": os.getpid()}) + "\n")


def cut_back(*, metrics: Path, rollouts: Path, position: LoopPosition | None) -> None:
    """Truncate a run's records to the checkpoint that the run continues from.

    Lines of later steps are removed, since those steps are repeated; so are evaluations that the
    checkpoint does not include, an unfinished last line, and lines that are not JSON. A file is
    replaced by one rename, or unchanged. A run that starts from the beginning keeps its earlier
    files under another name.

    Args:
        position: position of the checkpoint; None if the run starts from the beginning.

    Raises:
        UnwrittenError: the disk has no room for the kept lines; the file is unchanged.
    """
    num_kept, *_ = (_cut(file, position) for file in (metrics, previous_file(rollouts), rollouts))
    if position is not None and num_kept < position.num_records:
        logger.warning(
            "%s has %d lines up to step %d, but %d were written: some are lost",
            metrics, num_kept, position.step, position.num_records,
        )  # fmt: skip


def _cut(file: Path, position: LoopPosition | None) -> int:
    """Return the number of kept lines; a file without any is removed or, without a checkpoint,
    renamed.
    """
    if not file.exists():
        return 0
    if position is None:
        old = file.with_name(f"{file.name}{OLD_SUFFIX}")
        logger.warning(
            "the run starts from the beginning: its earlier %s is now %s", file.name, old.name
        )
        with writing(file):
            file.replace(old)
        return 0
    with file.open("rb") as opened:
        lines = opened.readlines()
    kept = [line for line in lines if _is_kept(line, position)]
    with writing(file):
        if len(kept) < len(lines):
            logger.info(
                "%s: removed %d lines of steps that are repeated", file.name, len(lines) - len(kept)
            )
        if not kept:
            file.unlink()
        elif len(kept) < len(lines):
            with atomic_write(file) as new, new.open("wb") as shorter:
                shorter.writelines(kept)
                shorter.flush()
                os.fsync(shorter.fileno())
    return len(kept)


def _is_kept(line: bytes, position: LoopPosition) -> bool:
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
    if step > position.step:
        return False
    return step < position.step or position.evaluated or not is_evaluation
