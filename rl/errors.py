"""Errors that end a run and are meant for the person who started it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.activity import doing


class RunError(RuntimeError):
    """A run cannot go on; the message says why and needs no traceback beside it."""

    where = ""
    """Place in the run, such as "step 3"; set by `naming`."""
    more = ""
    """What is known of it beside the message, on lines of its own."""

    def message(self) -> str:
        """What went wrong, without the place."""
        return super().__str__()

    def __str__(self) -> str:
        message = f"{self.where}: {self.message()}" if self.where else self.message()
        return f"{message}\n{self.more}" if self.more else message


class UnwrittenError(RunError):
    """A file of the run could not be written; what it held before is whole."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the disk as an `UnwrittenError` that names the file, and says what the disk did."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UnwrittenError(f"{path} was not written, what was there is as it was: {why}") from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """An error from inside says where in the run it came up: a `RunError` in its message, any other
    in a note. Who looks at this process meanwhile is told the same."""
    try:
        with doing(where):
            yield
    except RunError as error:
        error.where = error.where or where
        raise
    except Exception as error:
        error.add_note(where)
        raise
