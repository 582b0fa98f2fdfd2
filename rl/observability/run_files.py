"""Files of a run's folder: their names, and what a folder holds that may be a run's.

Readers take nothing in a folder for granted, as it may come from anybody: `refuse_special_files`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rl.observability.spans import SPANS_FOLDER, STATE_FOLDER
from rl.utils.files import LOCK, TMP_SUFFIX, is_regular, parse_json, read_regular

STARTING_POINTS = "starting_points"
"""Folder beside the runs that keeps warmed-up and converted models for later runs."""
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
OLD_SUFFIX = ".old"
"""Suffix of the earlier records of a run that started again from the beginning."""
TENSORBOARD = "tensorboard"
LOGS = "logs"
OWN_FOLDERS = (LOGS, "checkpoints")
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


def read_status(path: Path) -> Literal["running", "finished"] | None:
    """Return the status of a run, "running" also if it was killed; None without status.json."""
    if not is_run(path):
        return None
    try:
        content = parse_json(read_regular(path / STATUS))
    except ValueError:  # cut short by the end of its process
        return "running"
    return "finished" if content["status"] == "finished" else "running"


def refuse_special_files(path: Path) -> None:
    """Raise ValueError for links, pipes and devices in place of the files and folders of a run.

    A link may lead to any file of this user, and a pipe or a device may have no end.
    """
    files = [
        path / name for name in (CONFIG, DEFAULTS, ENVIRONMENT, EVENTS, METRICS, STATUS, *ROLLOUTS)
    ]
    for folder in (path / LOGS, path / LOGS / STATE_FOLDER, path / LOGS / SPANS_FOLDER):
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, not a folder of the run")
        if folder.name != LOGS:
            files += folder.glob("*")
    for file in files:
        if not is_regular(file, may_be_missing=True):
            raise ValueError(f"{file} is not a regular file")


def is_run(path: Path) -> bool:
    """Return whether a folder has the status of a run, or a config beside a status that is
    damaged.
    """
    if not is_regular(path / STATUS):
        return False
    try:
        status = parse_json(read_regular(path / STATUS))
        return isinstance(status, dict) and status.get("status") in ("running", "finished")
    except ValueError:
        return is_regular(path / CONFIG)


def is_unused(path: Path) -> bool:
    """Return whether a folder holds at most what a start leaves that was killed before it wrote the
    status.
    """
    for entry in path.iterdir():
        is_empty = entry.name in OWN_FOLDERS and not entry.is_symlink() and entry.is_dir()
        if is_empty and not any(entry.iterdir()):
            continue
        if entry.name not in (LOCK, f"{STATUS}{TMP_SUFFIX}") or not is_regular(entry):
            return False
    return True


def remove_versions(folder: Path) -> None:
    """Remove the versions of the weights that were published as files, and the folder if nothing
    else is in it.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    for version in folder.iterdir():
        if _VERSION.fullmatch(version.name) and not version.is_symlink():
            shutil.rmtree(version, ignore_errors=True)
    with suppress(OSError):  # it holds something that a person put there
        folder.rmdir()


def files_of_runs(path: Path, *, suffixes: Sequence[str]) -> list[Path]:
    """Return the files that runs write; those with `TMP_SUFFIX` were left by a process that was
    killed.
    """
    return [file for name in OWN_FILES for suffix in suffixes for file in path.glob(name + suffix)]
