"""A run's records, cut back to where it goes on from.

Lines of later steps are removed: they will be written again, and an evaluation that the checkpoint does not
know of is done again. So are a last line that its process did not end, and lines that are not JSON. A file
is replaced by one rename, or stays as it is.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.atomic_file import replacing
from rl.errors import writing
from rl.observability.recorder import previous_file
from rl.types import LoopPosition

_STEP = re.compile(rb'\{"step": (\d+), ')
_KIND = re.compile(rb'"kind": "(\w+)"')
_HEAD_BYTES = 400
"""A rollout's line says within this what it is of."""
BEFORE = ".before"
"""In the names of records of a run that had to start again from its beginning."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutFile:
    """What was done to one file."""

    num_kept: int = 0
    num_cut: int = 0


def cut_back(
    *, metrics: Path, rollouts: Path, position: LoopPosition | None, keep_old: bool = False
) -> CutFile:
    """Cut a run's files; what was done to the metrics.

    Args:
        metrics: metrics.jsonl.
        rollouts: rollouts.jsonl; the one before it is cut too.
        position: of the checkpoint; None: the run starts from its beginning.
        keep_old: a file of which nothing is kept is renamed, as metrics.before.jsonl, not removed.

    Raises:
        UnwrittenError: there is no room for what is kept; the file is as it was.
    """
    cut = _cut(metrics, lambda line: _keeps_record(line, position), keep_old=keep_old)
    for file in (previous_file(rollouts), rollouts):
        _cut(file, lambda line: _keeps_rollout(line, position), keep_old=keep_old)
    if cut.num_cut:
        logger.info("%s: %d lines that are written again were removed", metrics.name, cut.num_cut)
    if position is not None and cut.num_kept < position.num_records:
        logger.warning(
            "%s has %d lines up to step %d, %d were written: some are lost",
            metrics,
            cut.num_kept,
            position.step,
            position.num_records,
        )
    return cut


def _keeps_record(line: bytes, position: LoopPosition | None) -> bool:
    record = json.loads(line)
    return _keeps(int(record["step"]), any(name.startswith("eval/") for name in record), position)


def _keeps_rollout(line: bytes, position: LoopPosition | None) -> bool:
    step, kind = _STEP.match(line), _KIND.search(line[:_HEAD_BYTES])
    if step is not None and kind is not None and line.endswith(b"}\n"):
        return _keeps(int(step[1]), kind[1].startswith(b"eval"), position)
    said = json.loads(line)
    return _keeps(int(said["step"]), str(said["kind"]).startswith("eval"), position)


def _keeps(step: int, is_evaluation: bool, position: LoopPosition | None) -> bool:
    if position is None or step > position.step:
        return False
    return step < position.step or position.evaluated or not is_evaluation


def kept_aside(file: Path) -> Path:
    """Where a file goes of which nothing is kept."""
    return file.with_name(f"{file.stem}{BEFORE}{file.suffix}")


def _cut(file: Path, keeps: Callable[[bytes], bool], *, keep_old: bool) -> CutFile:
    """Keep these lines alone; a file without any is removed, or `kept_aside`."""
    if not file.exists():
        return CutFile()
    with file.open("rb") as lines:
        kept = [_is_whole_and(keeps, line) for line in lines]
    done = CutFile(num_kept=sum(kept), num_cut=len(kept) - sum(kept))
    with writing(file):
        if done.num_kept and done.num_cut:
            _write_kept(file, kept)
        elif not done.num_kept and keep_old:
            file.replace(kept_aside(file))
        elif not done.num_kept:
            file.unlink()
    return done


def _write_kept(file: Path, kept: Sequence[bool]) -> None:
    with replacing(file) as new, file.open("rb") as lines, new.open("wb") as shorter:
        shorter.writelines(line for line, keep in zip(lines, kept, strict=True) if keep)
        shorter.flush()
        os.fsync(shorter.fileno())


def _is_whole_and(keeps: Callable[[bytes], bool], line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return keeps(line)
    except (ValueError, KeyError, TypeError):
        logger.warning("a line that is no record was removed: %.80r", line)
        return False
