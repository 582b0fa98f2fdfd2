"""What this process does within a test, kept as its spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.activity import THIS_PROCESS
from rl.observability.span_file import SPANS_FOLDER, SpanFile


@contextmanager
def kept_spans(logs: Path) -> Iterator[None]:
    """Within it; afterwards `rl.observability.spans.read_spans(logs)` has them all."""
    path = logs / SPANS_FOLDER / "test-0.jsonl"
    THIS_PROCESS.keep_spans(SpanFile(path, role="test", rank=0, max_bytes=1 << 20))
    try:
        yield
    finally:
        THIS_PROCESS.keep_spans(None)
