"""The kernel's choice of the process that it kills when memory runs out: agents go first.

Without it the kernel takes the largest process, which is the trainer or a generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE = Path("/proc/self/oom_score_adj")
FIRST = 1000
"""Largest score: before any process with a smaller one, whatever their sizes are."""


def be_killed_first() -> None:
    """Let this process and its children go first."""
    # A sandbox may lack the file, or refuse to write it.
    with suppress(OSError):
        FILE.write_text(str(FIRST))


@contextmanager
def let_children_be_killed_first() -> Iterator[None]:
    """Let the children that the block starts go first, not this process.

    Not written for a child that runs already, which could have started others.
    """
    before = ""
    with suppress(OSError):
        before = FILE.read_text()
    be_killed_first()
    try:
        yield
    finally:
        with suppress(OSError):
            FILE.write_text(before)
