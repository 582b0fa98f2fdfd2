"""Errors that end a run, and warnings about files that a run can lack."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FAILING: set[Path] = set()
"""Optional files whose latest write failed."""

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run cannot go on; the message gives the reason and needs no traceback.

    Example:
        >>> error = RunError("no judge is there")
        >>> error.where = "step 3"
        >>> str(error)
        'step 3: no judge is there'
    """

    where = ""
    """Position in the run, such as "step 3"; set by `rl.observability.spans.add_error_context`."""
    more = ""
    """Details on lines of their own, after the message."""

    def message(self) -> str:
        """Return the reason without the position."""
        return super().__str__()

    def __str__(self) -> str:
        message = f"{self.where}: {self.message()}" if self.where else self.message()
        return f"{message}\n{self.more}" if self.more else message


class StopRequestedError(Exception):
    """A loop ended between two steps because a stop was requested."""


class UnwrittenError(RunError):
    """A file of the run could not be written; the previous content is intact."""


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and its chain of causes, each once even if the chain is a circle."""
    # By identity: errors may be equal, and need not have a hash.
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def describe_disk_error(error: Exception) -> str:
    """Return the system's reason of an error of the disk, without a path."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors raises errors of its own, with the number in their text.
        match = re.search(r"os error (\d+)", str(error))
        number = None if match is None else int(match[1])
    return "unknown reason" if number is None else os.strerror(number)


@contextmanager
def raise_unwritten(path: Path) -> Iterator[None]:
    """Turn an OSError into an `UnwrittenError` that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnwrittenError(
            f"{path} was not written, its previous content is intact: {reason}"
        ) from error


@contextmanager
def warn_unwritten(path: Path) -> Iterator[None]:
    """Turn an OSError into a warning, once until a write succeeds.

    The run goes on without the file.
    """
    try:
        yield
    except OSError as error:
        is_new = path not in _FAILING
        _FAILING.add(path)
        if is_new:
            logger.warning("%s was not written: %s; the run goes on", path, error.strerror or error)
            # Again: if the path is that of the log, and the log takes the warning, this function
            # has forgotten the path meanwhile.
            _FAILING.add(path)
    else:
        _FAILING.discard(path)
