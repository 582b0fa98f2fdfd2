"""Checkpoint folders that are complete on disk but hold no real tensors."""

from __future__ import annotations

from pathlib import Path

from rl.training.checkpoints.files import SavedState, sum_of_file, write_description
from rl.types import LoopPosition


def save(folder: Path, step: int, *, model_only: bool = False, position: bool = True) -> Path:
    """Write `step-<n>` as a loop saves it; the position is 8 problems a step."""
    at = LoopPosition(step=step, num_problems=8 * step) if position else None
    return save_fake(folder / f"step-{step}", version=step, model_only=model_only, position=at)


def save_fake(path: Path, *, version: int, model_only: bool, position: LoopPosition | None) -> Path:
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors of a step")
    state = SavedState(policy_version=version, model_only=model_only, position=position)
    write_description(path, state, {"__0_0.distcp": sum_of_file(path / "__0_0.distcp")})
    return path


def truncate(file: Path) -> None:
    """Cut three bytes off the end."""
    file.write_bytes(file.read_bytes()[:-3])
