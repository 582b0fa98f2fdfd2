"""Event files, read as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return [(step, value)] by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(p.step, p.value) for p in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
