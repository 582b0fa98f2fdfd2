"""When and where a loop saves, through the learner."""

from __future__ import annotations

from dataclasses import dataclass

from rl.protocols import Learner
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.checkpoint_files import step_folder
from rl.types import LoopPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCheckpoints:
    """Checkpoints of a loop's steps, `folder/step-<n>`."""

    learner: Learner
    config: CheckpointConfig
    folder: str

    async def save_if_due(self, position: LoopPosition, *, last: bool = False) -> None:
        """Save after the step of `position`; only the last is waited for."""
        if not self.config.due(position.step, last=last):
            return
        await self.learner.save_checkpoint(
            str(step_folder(self.folder, position.step)),
            position=position,
            model_only=last and self.config.last_save_model_only,
            wait=last,
        )
