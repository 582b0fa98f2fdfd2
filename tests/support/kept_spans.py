"""Recording of this process's spans within a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.spans import RECORDER, SPANS_FOLDER
from rl.utils.files import BoundedFile


@contextmanager
def kept_spans(logs: Path) -> Iterator[None]:
    """Record ended spans, for `rl.observability.timeline.read_spans(logs)` afterwards."""
    (logs / SPANS_FOLDER).mkdir(exist_ok=True)
    RECORDER.log = BoundedFile(logs / SPANS_FOLDER / "test-0.jsonl", max_bytes=1 << 20)
    try:
        yield
    finally:
        RECORDER.stop()
