"""Truncation of a run's records to the checkpoint that the run continues from.

Lines of later steps are removed, since those steps are repeated; so are evaluations that the checkpoint does not
include, an unfinished last line, and lines that are not JSON. A file is replaced by one rename, or unchanged.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from rl.observability.bounded_file import previous_file
from rl.types import LoopPosition
from rl.utils.errors import writing
from rl.utils.files import atomic_write

BEFORE = ".before"
"""Suffix of the records of a run that had to start again from the beginning."""

logger = logging.getLogger(__name__)


def cut_back(*, metrics: Path, rollouts: Path, position: LoopPosition | None, keep_old: bool = False) -> None:
    """Truncate a run's records.

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
