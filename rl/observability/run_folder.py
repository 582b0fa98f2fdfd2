"""Folder of one run: the names of its files, and its lock.

    outputs/<name>/
        config.json  defaults.json  metrics.jsonl  rollouts.jsonl  learning_curve.png  events.jsonl
        environment.json status.json  and, made on request, timeline.json  report.html logs/
        checkpoints/  and of enabled sinks tensorboard/  wandb/

The run holds a lock on `.lock`, which the kernel releases when the process ends. `status.json` says
whether the run finished. A run that continues from a checkpoint first truncates its records to the
checkpoint (`rl.observability.metrics.cut_back`).

Readers take nothing in a folder for granted, as it may come from anybody: `refuse_special_files`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from filelock import FileLock

from rl.observability.metrics import OLD_SUFFIX
from rl.observability.spans import SPANS_FOLDER, STATE_FOLDER
from rl.utils.errors import raise_unwritten
from rl.utils.files import (
    LOCK,
    TMP_SUFFIX,
    is_regular,
    lock_folder,
    make_folder,
    name_folder_errors,
    parse_json,
    read_regular,
    replace_file,
)

STARTING_POINTS = "starting_points"
"""Folder beside the runs that keeps warmed-up and converted models for later runs."""
DATA, FUNCTIONS = "data", "functions"
"""Folders beside the runs that keep rows and reward functions which were given as Python objects.
"""
NO_RUNS = (STARTING_POINTS, DATA, FUNCTIONS)
"""Folders beside the runs."""
STATUS = "status.json"
CONFIG = "config.json"
AS_WHAT = "a run's folder"
EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
DEFAULTS = "defaults.json"
"""File with the values that the run's config function returns without options."""
REPORT = "report.html"
TIMELINE = "timeline.json"
METRICS = "metrics.jsonl"
ROLLOUTS = ("rollouts.jsonl", "rollouts.1.jsonl")
TENSORBOARD = "tensorboard"
LOGS = "logs"
LEDGER = "ledger"
OWN_FOLDERS = (LOGS, "checkpoints")
LEDGERS = (LEDGER, f"{LEDGER}{OLD_SUFFIX}")
SINK_FOLDERS = (TENSORBOARD, "wandb")
WEIGHTS = "weights"
"""Folder of weights that are published as files; its versions are removed at a regular end of the
run.
"""
OWN_FILES = (
    CONFIG, DEFAULTS, METRICS, *ROLLOUTS, f"*.jsonl{OLD_SUFFIX}", "pass_rates.jsonl",
    "learning_curve.png",
    EVENTS, ENVIRONMENT, REPORT, TIMELINE, STATUS, "nan_batch_*.npz", "collectives_rank*",
)  # fmt: skip
"""Patterns of the files that a run writes; the last two are of a trainer that failed: the batch of
a loss that is not finite, and the latest collectives of each rank."""

_VERSION = re.compile(r"v\d+")


# What a folder holds


def read_status(path: Path) -> Literal["running", "finished"] | None:
    """Return the status of a run, "running" also if it was killed; None without status.json.

    Example:
        >>> read_status(Path("outputs/x"))
        'finished'
    """
    if not is_run(path):
        return None
    try:
        content = parse_json(read_regular(path / STATUS))
    except ValueError:
        # The file was cut short by the end of its process.
        return "running"
    return "finished" if content["status"] == "finished" else "running"


def refuse_special_files(path: Path) -> None:
    """Raise ValueError for links, pipes and devices in place of the files and folders of a run.

    A link may lead to any file of this user, and a pipe or a device may have no end.
    """
    names = (CONFIG, DEFAULTS, ENVIRONMENT, EVENTS, METRICS, STATUS, *ROLLOUTS)
    files = [path / name for name in names]
    for folder in (path / LOGS, path / LOGS / STATE_FOLDER, path / LOGS / SPANS_FOLDER):
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, not a folder of the run")
        # Of the other logs no program reads any.
        if folder.name != LOGS:
            files += folder.glob("*")
    for file in files:
        if not is_regular(file, may_be_missing=True):
            raise ValueError(f"{file} is not a regular file")


def is_run(path: Path) -> bool:
    """Return whether a folder has the status of a run, or a damaged status beside a config."""
    if not is_regular(path / STATUS):
        return False
    try:
        status = parse_json(read_regular(path / STATUS))
        return isinstance(status, dict) and status.get("status") in ("running", "finished")
    except ValueError:
        return is_regular(path / CONFIG)


def is_unused(path: Path) -> bool:
    """Return whether a folder holds at most what a start leaves that was killed early.

    Such a start has not written the status, so the folder is not yet a run's.
    """
    for entry in path.iterdir():
        is_empty = entry.name in OWN_FOLDERS and not entry.is_symlink() and entry.is_dir()
        if is_empty and not any(entry.iterdir()):
            continue
        if entry.name not in (LOCK, f"{STATUS}{TMP_SUFFIX}") or not is_regular(entry):
            return False
    return True


def remove_versions(folder: Path) -> None:
    """Remove the weights that were published as files, and the folder if nothing else is in it."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for version in folder.iterdir():
        if _VERSION.fullmatch(version.name) and not version.is_symlink():
            shutil.rmtree(version, ignore_errors=True)
    # It may hold something that a person put there.
    with suppress(OSError):
        folder.rmdir()


def list_files(path: Path, *, suffixes: Sequence[str]) -> list[Path]:
    """Return the files that runs write; a killed process leaves those with `TMP_SUFFIX`."""
    files: list[Path] = []
    for name in OWN_FILES:
        for suffix in suffixes:
            files += path.glob(name + suffix)
    return files


# The folder of a run that writes into it


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
        self.ledger = path / LEDGER
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
        numbers = count(2)
        while time_stamp and not is_new:
            path = path.with_name(f"{name}-{next(numbers)}")
            is_new = _make_new(path)
        make_folder(path, AS_WHAT)
        _refuse_foreign(path)

        folder = cls(path, checkpoints=checkpoints, is_new=is_new)
        try:
            folder._lock = lock_folder(path, as_what=AS_WHAT, otherwise="choose another name")
            # With the lock, as another run may have begun here meanwhile.
            check_free(path, overwrite=overwrite)
            _refuse_inputs(path, inputs or {})
            with name_folder_errors(path, AS_WHAT):
                if overwrite:
                    _clear(path)
                folder._start()
        except BaseException:
            folder._close_and_remove()
            raise
        return folder

    @classmethod
    def resume(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Lock the folder, to continue its run after `resume_writing`.

        Raises ValueError if it is not the folder of a run, or its run goes on.
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

    def resume_writing(self) -> None:
        """Mark the run as running again, and remove temporary files of its last process."""
        for file in list_files(self.path, suffixes=(TMP_SUFFIX,)):
            file.unlink(missing_ok=True)
        remove_versions(self.path / WEIGHTS)
        with name_folder_errors(self.path, AS_WHAT):
            self._start()

    def _start(self) -> None:
        for folder in (self.logs, self.checkpoints):
            # Another folder for checkpoints is made by the trainer.
            if folder.parent == self.path:
                folder.mkdir(exist_ok=True)
        _write_status(self.path, "running")

    def mark_finished(self) -> None:
        """Mark the run as finished; after an UnwrittenError it still counts as unfinished."""
        with raise_unwritten(self.path / STATUS):
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

    # A link to another disk is the person's own way to place a run. A link to a run beside it, such
    # as `latest`, is only another name.
    is_link = path.is_symlink()
    if is_link and (path.parent / path.readlink()).parent.resolve() == path.parent.resolve():
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
    with name_folder_errors(path, AS_WHAT):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            return False
    return True


def _refuse_foreign(path: Path) -> None:
    """Refuse a folder that holds something and is not a run's.

    No file of a person is replaced, or stands among those of a run.
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
    folders = [path / name for name in (*OWN_FOLDERS, *SINK_FOLDERS, *LEDGERS)]
    for target in (*folders, *list_files(path, suffixes=("", TMP_SUFFIX))):
        # Of a link only the link is removed: its target may hold other things.
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _write_status(path: Path, status: Literal["running", "finished"]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with replace_file(path / STATUS) as file:
        file.write_text(json.dumps({"status": status, "since": now, "pid": os.getpid()}) + "\n")
