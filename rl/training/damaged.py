"""Checkpoints that turn out to be damaged: set aside, and the one before is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rl.training.checkpoint_files import DamagedCheckpointError, saved_steps, set_aside

T = TypeVar("T")

Skip = Callable[[Path, DamagedCheckpointError], None]
"""Is told of a checkpoint that is damaged, and why."""

logger = logging.getLogger(__name__)


def put_aside(path: Path, error: DamagedCheckpointError) -> None:
    """Say what is wrong with a checkpoint, and let nobody load it any more.

    Raises:
        DamagedCheckpointError: it cannot be renamed.
    """
    try:
        aside = set_aside(path)
    except OSError as problem:
        why = problem.strerror or problem
        raise DamagedCheckpointError(f"{error}; it could not be set aside: {why}") from problem
    logger.warning("%s; it is set aside as %s, and an earlier one is taken", error, aside.name)


def newest_usable(folder: Path, check: Callable[[Path], T], *, skip: Skip = put_aside) -> T | None:
    """What `check` says of the latest checkpoint that it does not call damaged; `skip` is told of those."""
    for path in reversed(saved_steps(folder).values()):
        try:
            return check(path)
        except DamagedCheckpointError as error:
            skip(path, error)
    return None
