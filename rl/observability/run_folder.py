"""The folder of one run: who may write into it, and what is in it.

    outputs/<name>/
        config.json  metrics.jsonl  rollouts.jsonl  learning_curve.png  events.jsonl  environment.json
        status.json  timeline.json  report.html
        logs/  checkpoints/  and, of sinks that are asked for, tensorboard/  wandb/

A lock on `.lock` is held while the run lives; the kernel drops it when the process ends, however
it ends. `status.json` says whether the run finished.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Literal

from rl.atomic_file import SUFFIX, replacing
from rl.errors import writing
from rl.folder_lock import LOCK, lock, make_folder, remove_empty, usable

STATUS = "status.json"
AS_WHAT = "a run's folder"
EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
REPORT = "report.html"
TIMELINE = "timeline.json"
METRICS = "metrics.jsonl"
ROLLOUTS = ("rollouts.jsonl", "rollouts.1.jsonl")
OWN_FILES = (
    "config.json",
    METRICS,
    "learning_curve.png",
    *ROLLOUTS,
    "metrics.before.jsonl",
    "rollouts.before.jsonl",
    "rollouts.1.before.jsonl",
    "pass_rates.jsonl",
    EVENTS,
    ENVIRONMENT,
    REPORT,
    TIMELINE,
    STATUS,
)
PARTIAL_FILES = tuple(f"{name}{SUFFIX}" for name in OWN_FILES)
"""Of a process that was killed while it wrote; the next run that has the folder removes them."""
OWN_FOLDERS = ("logs", "checkpoints")
TENSORBOARD = "tensorboard"
SINK_FOLDERS = (TENSORBOARD, "wandb")
"""Made by sinks; W&B names its own."""
WEIGHTS = "weights"
"""Where weights travel as files, unless they are elsewhere; gone when the run has ended in order."""
FAILURE_FILES = ("nan_batch_*.npz", "collectives_rank*")
"""Of a trainer that stops: the batch of a loss that is not finite, the latest collectives of each rank."""


class RunFolder:
    """A run's folder, locked for this process until closed; a context manager.

    Leaving it does not make a run finished: a run that fails or is killed stays unfinished.
    """

    def __init__(
        self, path: Path, *, checkpoints: Path | None, lock_fd: int | None, created: Path | None
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
        self._lock_fd: int | None = lock_fd
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
        """Make and lock `dump_folder/name`; with `time_stamp`, `-YYYYmmdd-HHMMSS` is added to the name, and
        `-2` and so on where there is such a run: a clock that is set back shows a time twice.

        Args:
            inputs: files and folders, by field, that the run is going to read.
            checkpoints: a folder elsewhere for them, which is neither made nor cleared here.
            wall_clock: local time; names the folder and decides nothing.

        Raises:
            ValueError: the folder cannot be made, is no run's folder, is in use, or holds a
                finished or unfinished run and `overwrite` is false; or an input lies in the folder
                that is to be replaced. Nothing is left behind.
        """
        if time_stamp:
            name = _free_name(Path(dump_folder).expanduser(), f"{name}-{wall_clock():%Y%m%d-%H%M%S}")
        if not name or name in (".", "..") or Path(name).name != name:
            raise ValueError(f"name={name!r} is not a folder name")
        path = Path(dump_folder).expanduser().absolute() / name
        created = make_folder(path, AS_WHAT)
        _refuse_foreign(path)
        had_lock = (path / LOCK).exists()
        try:
            lock_fd = lock(path, as_what=AS_WHAT, otherwise="choose another name")
        except ValueError:
            remove_empty(path, topmost=created)
            raise
        try:
            status = read_status(path)
            if status is not None and not overwrite:
                raise ValueError(_occupied(path, status))
            _refuse_inputs(path, inputs or {})
            with usable(path, AS_WHAT):
                _clear(path)
                for folder in OWN_FOLDERS if checkpoints is None else OWN_FOLDERS[:1]:
                    (path / folder).mkdir()
                _write_status(path, "running")
        except BaseException:
            if created is not None:
                _remove(path, topmost=created)
            elif not had_lock:
                for name in OWN_FOLDERS:
                    with contextlib.suppress(OSError):
                        (path / name).rmdir()
                (path / LOCK).unlink()
            os.close(lock_fd)
            raise
        return cls(path, checkpoints=checkpoints, lock_fd=lock_fd, created=created)

    @classmethod
    def resume(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Lock the folder of a run that has ended, to go on in it; nothing in it changes before `reopen`.

        Raises:
            ValueError: it is no run's folder, or in use by one that goes on.
        """
        folder = cls.to_read(path, checkpoints=checkpoints)
        folder._lock_fd = lock(path, as_what=AS_WHAT, otherwise="only a run that has ended can be resumed")
        return folder

    @classmethod
    def to_read(cls, path: Path, *, checkpoints: Path | None = None) -> RunFolder:
        """Without its lock, so that another process may have it: nothing is to be written here.

        Raises:
            ValueError: it is no run's folder.
        """
        if not path.is_dir() or read_status(path) is None:
            raise ValueError(f"{path} is not the folder of a run: it has no {STATUS}")
        return cls(path, checkpoints=checkpoints, lock_fd=None, created=None)

    @property
    def is_finished(self) -> bool:
        """Whether its run came to its end."""
        return read_status(self.path) == "finished"

    def reopen(self) -> None:
        """The run goes on: it is unfinished again, and what its last process left half done is removed."""
        for name in PARTIAL_FILES:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / WEIGHTS, ignore_errors=True)
        with usable(self.path, AS_WHAT):
            for folder in OWN_FOLDERS:
                if folder == self.logs.name or self.checkpoints.parent == self.path:
                    (self.path / folder).mkdir(exist_ok=True)
            _write_status(self.path, "running")

    def mark_finished(self) -> None:
        """From now on the folder is refused without `overwrite`, as a finished run's.

        Raises:
            UnwrittenError: status.json cannot be written, so that the run still counts as unfinished.
        """
        with writing(self.path / STATUS):
            _write_status(self.path, "finished")

    def discard(self) -> None:
        """Undo `create`: a run that was refused before it began leaves no folder behind."""
        if self._created is not None:
            _remove(self.path, topmost=self._created)
        else:
            _clear(self.path)
            (self.path / LOCK).unlink()
        self.close()

    def close(self) -> None:
        """Free the folder for others; safe to call twice."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_free(path: Path, *, overwrite: bool) -> None:
    """What `RunFolder.create` would refuse of the folder, which is only looked at.

    Raises:
        ValueError: it is no run's folder, or holds a run and `overwrite` is false.
    """
    if not path.is_dir():
        return
    _refuse_foreign(path)
    status = read_status(path)
    if status is not None and not overwrite:
        raise ValueError(_occupied(path, status))


def read_status(path: Path) -> Literal["running", "finished"] | None:
    """What a run's `status.json` says, "running" also of a run that was killed; None without the file."""
    try:
        content = json.loads((path / STATUS).read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # cut short by the end of its process
        return "running"
    return "finished" if content.get("status") == "finished" else "running"


def _free_name(folder: Path, name: str) -> str:
    names = chain((name,), (f"{name}-{number}" for number in count(2)))
    return next(free for free in names if not os.path.lexists(folder / free))


def _refuse_foreign(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if names and not names & {LOCK, STATUS}:
        raise ValueError(f"{path} exists and is not a run's folder; choose another name")


def _refuse_inputs(path: Path, inputs: Mapping[str, Path]) -> None:
    """What the run starts from must outlive the clearing, be it under another name."""
    for field, given in inputs.items():
        file = Path(os.path.abspath(given.expanduser()))
        links = [entry for entry in file.iterdir() if entry.is_symlink()] if file.is_dir() else []
        for entry in (file, *links):
            if entry.is_relative_to(path) or entry.resolve().is_relative_to(path.resolve()):
                raise ValueError(
                    f"{field}={str(given)!r} lies in the folder of the run that --overwrite would replace, "
                    f"{path}; choose another name"
                )


def _occupied(path: Path, status: str) -> str:
    if status == "finished":
        return f"{path} holds a finished run; choose another name, or --overwrite to replace it"
    return (
        f"{path} holds an unfinished run (it failed or was killed); go on with it by --resume {path}, choose "
        "another name, or --overwrite to replace it"
    )


def _clear(path: Path) -> None:
    """Remove what a run wrote, and nothing else that somebody put there."""
    failures = [file.name for pattern in FAILURE_FILES for file in path.glob(pattern)]
    for name in (*OWN_FOLDERS, *SINK_FOLDERS, *OWN_FILES, *PARTIAL_FILES, *failures):
        target = path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            with contextlib.suppress(FileNotFoundError):
                target.unlink()


def _remove(path: Path, *, topmost: Path) -> None:
    """Remove a run's folder, and the folders made for it up to `topmost` unless others use them now."""
    shutil.rmtree(path)
    remove_empty(path.parent, topmost=topmost)


def _write_status(path: Path, status: Literal["running", "finished"]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with replacing(path / STATUS) as file:
        file.write_text(json.dumps({"status": status, "since": now, "pid": os.getpid()}) + "\n")
