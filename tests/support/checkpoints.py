"""Checkpoint folders that are complete on disk but hold no real tensors."""

from __future__ import annotations

from pathlib import Path

from rl.training.checkpoint_files import SavedState, sum_of_file, write_description
from rl.types import LoopPosition


def save(folder: Path, step: int, *, model_only: bool = False, position: bool = True) -> Path:
    """Write `step-<n>` as a loop saves it; the position is 8 problems a step."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors of a step")
    state = SavedState(
        policy_version=step,
        model_only=model_only,
        position=LoopPosition(step=step, num_problems=8 * step) if position else None,
    )
    sums = {"__0_0.distcp": sum_of_file(path / "__0_0.distcp")}
    write_description(path, state, sums)
    return path


def truncate(file: Path) -> None:
    """Cut three bytes off the end."""
    file.write_bytes(file.read_bytes()[:-3])
