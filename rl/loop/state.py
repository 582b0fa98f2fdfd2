"""The position of a loop between two steps, and the checkpoints that keep it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from rl.protocols import Trainer
from rl.rollouts.producer import NumberedProblems, RolloutProducer
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.checkpoints.files import step_folder
from rl.training.failures import CheckpointError
from rl.types import LoopPosition, ProblemsFingerprint
from rl.utils.errors import RunError

ANSWER_S = 30.0
"""Seconds for a trainer to drop its gradient after an error, before the loop gives up saving."""

logger = logging.getLogger(__name__)


class Progress:
    """Steps and evaluations that a running loop has done, from which it can continue."""

    def __init__(
        self,
        *,
        problems: NumberedProblems,
        producer: RolloutProducer,
        start: LoopPosition,
        evaluates: bool,
    ) -> None:
        """Take the position of an earlier loop as `start`, or that of a loop without steps.

        `evaluates` is False for a loop without evaluations.
        """
        self._problems = problems
        self._producer = producer
        self.done = start.step
        """Completed steps."""
        self.evaluated = not evaluates or start.evaluated
        """True if no evaluation is due before the next step."""
        self.num_empty_steps = start.num_empty_steps
        self.has_batch = False
        """True while a step trains on its batch."""
        self.whole: LoopPosition | None = self.make_position()
        """Position after the last completed step; None while the weights are between two steps."""

    def make_position(self) -> LoopPosition:
        """Return the position between two steps.

        Groups that have finished but are not trained on are generated again, so that a checkpoint
        needs no rollouts.
        """
        position = self._problems.make_position(self.done, outstanding=self._producer.outstanding)
        return replace(position, evaluated=self.evaluated, num_empty_steps=self.num_empty_steps)

    def finish_step(self, step: int, *, has_gradient: bool, evaluation_is_due: bool) -> None:
        self.done = step
        self.has_batch = False
        self.evaluated = not evaluation_is_due
        self.num_empty_steps = 0 if has_gradient else self.num_empty_steps + 1
        self.whole = self.make_position()

    def finish_evaluation(self) -> None:
        self.evaluated = True
        if self.whole is not None:
            self.whole = replace(self.whole, evaluated=True)


class FlushedRecords(Protocol):
    """A file of records that has to be on disk before a checkpoint that counts its lines."""

    @property
    def num_records(self) -> int: ...

    async def flush_to_disk(self) -> None:
        """Wait until the records would survive a power failure."""


@dataclass(kw_only=True, slots=True)
class StepCheckpoints:
    """Checkpoints of a loop, `folder/step-<n>`: the trainer's, with the loop's position."""

    trainer: Trainer
    config: CheckpointConfig
    folder: str
    records: FlushedRecords | None = None
    can_answer: Callable[[Exception], bool] = field(default=lambda error: True)
    """Returns True if the trainer can still be called after an error of the loop."""
    problems: ProblemsFingerprint | None = None
    """Fingerprint of the task's problems, which every checkpoint holds."""
    last_saved: int | None = None
    """Step of the last checkpoint, or of the checkpoint that the loop continues from."""

    def is_due(self, step: int, *, last: bool = False) -> bool:
        return step != self.last_saved and self.config.is_due(step, last=last)

    async def save(self, position: LoopPosition, *, last: bool = False, wait: bool = False) -> None:
        """Save the trainer, which has done the steps of `position`; always wait for the last."""
        # The position counts lines of metrics.jsonl: after a power failure a checkpoint must not
        # count lines that the disk has lost.
        if self.records is not None:
            await self.records.flush_to_disk()
            position = replace(position, num_records=self.records.num_records)
        await self.trainer.save_checkpoint(
            str(step_folder(self.folder, position.step)),
            position=replace(position, problems=self.problems),
            model_only=last and self.config.last_save_model_only,
            wait=wait or last,
        )
        self.last_saved = position.step

    def should_save(self, step: int) -> bool:
        """Return True if a loop that ends early after `step` has progress to save."""
        return self.config.saves and step > 0 and step != self.last_saved

    async def save_after(self, error: Exception, position: LoopPosition) -> None:
        """Save a loop that ends with an error if the trainer still answers; only log what fails."""
        step = position.step
        # A disk that has refused one checkpoint will refuse the next one.
        if (
            isinstance(error, CheckpointError)
            or not self.should_save(step)
            or not self.can_answer(error)
        ):
            return
        try:
            # A checkpoint holds no gradient. The short deadline also finds a trainer that does not
            # answer, before a save waits for it with a long one.
            async with asyncio.timeout(ANSWER_S):
                await self.trainer.drop_gradient()
            await self.save(position, wait=True)
            logger.info("step %d is saved before the run ends", step)
        except (RunError, OSError, TimeoutError) as problem:
            logger.warning("step %d is not saved before the run ends: %s", step, problem)
