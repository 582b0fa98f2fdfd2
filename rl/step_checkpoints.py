"""When and where a loop saves, through the learner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from rl.errors import RunError
from rl.loop_state import ATTACHMENT, LoopState, packed
from rl.protocols import Learner
from rl.random_states import RandomStates, process_states, restore_process_states
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.checkpoint_files import step_folder
from rl.training.errors import CheckpointError

CONTROLLER = "controller"
"""Name of the random states of the loop's own process."""
ANSWER_S = 30.0
"""A learner that does not forget a gradient within this saves nothing either."""

logger = logging.getLogger(__name__)


class Flushed(Protocol):
    """A file of records that a checkpoint relies on."""

    @property
    def num_records(self) -> int:
        """Lines that it has."""
        ...

    async def flush_to_disk(self) -> None:
        """Return when they would outlive a power failure."""
        ...


@dataclass(kw_only=True, slots=True)
class StepCheckpoints:
    """Checkpoints of a loop's steps, `folder/step-<n>`."""

    learner: Learner
    config: CheckpointConfig
    folder: str
    records: Flushed | None = None
    """On the disk before a checkpoint that counts them is."""
    processes: RandomStates | None = None
    """Those besides the learner's and the loop's own, whose random states are saved."""
    can_answer: Callable[[Exception], bool] = field(default=lambda error: True)
    """Whether the learner may be asked for anything after an error of the loop."""
    drawn_with: str = ""
    """Of all settings that rollouts depend on, as in `LoopState`."""
    last_saved: int | None = None
    """Step of the last checkpoint; one that a loop is continued from counts."""

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether a checkpoint is to be saved after `step`."""
        return step != self.last_saved and self.config.due(step, last=last)

    async def save(self, state: LoopState, *, last: bool = False, wait: bool = False) -> None:
        """Of the learner as it is, which has done the steps of `state`; the last is always waited for."""
        random_states = await self._random_states()
        state = replace(state, random_states=random_states, drawn_with=self.drawn_with)
        if self.records is not None:
            await self.records.flush_to_disk()
            position = replace(state.position, num_records=self.records.num_records)
            state = replace(state, position=position)
        step = state.position.step
        await self.learner.save_checkpoint(
            str(step_folder(self.folder, step)),
            position=state.position,
            model_only=last and self.config.last_save_model_only,
            wait=wait or last,
            attachments={ATTACHMENT: packed(state)},
        )
        self.last_saved = step

    def would_save(self, step: int) -> bool:
        """Whether a loop that ends early, after `step`, has something to save."""
        return self.config.saves and step > 0 and step != self.last_saved

    async def save_at_stop(self, state: LoopState) -> None:
        """Of a loop that ends as it was asked to; returns when it is written.

        Raises:
            CheckpointError: it could not be.
        """
        if self.would_save(state.position.step):
            await self.save(state, wait=True)

    async def save_after(self, error: Exception, state: LoopState) -> None:
        """Of a loop that ends with an error, if the learner is still there; what goes wrong is logged.

        `state` is that of the learner's weights, its random states those of now.
        """
        step = state.position.step
        if isinstance(error, CheckpointError) or not self.would_save(step) or not self.can_answer(error):
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.learner.drop_gradient()
            await self.save(state, wait=True)
            logger.info("step %d is saved before the run ends", step)
        except (RunError, OSError, TimeoutError) as problem:
            logger.warning("step %d is not saved before the run ends: %s", step, problem)

    async def restore_random_states(self, state: LoopState) -> None:
        """Of all processes but the learner's, which restores its own."""
        states = dict(state.random_states)
        if (own := states.pop(CONTROLLER, None)) is not None:
            restore_process_states(own)
        if states and self.processes is not None:
            await self.processes.restore_random_states(states)

    async def _random_states(self) -> dict[str, bytes]:
        others = {} if self.processes is None else await self.processes.random_states()
        return {CONTROLLER: process_states(), **others}
