"""The state of a loop between two steps, and the checkpoints that keep it.

    progress = Progress(...)                             the loop, step by step
    await checkpoints.save(progress.now())               after a step; the trainer writes its own state
    state = read_loop_state(folder)                      another start of the run, or the same after an error

A checkpoint's state.json has the loop's position too, which is enough to continue: without the rest, finished
groups are generated again and counts start anew.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rl.loop.config import LoopConfig
from rl.protocols import Trainer
from rl.rollouts.producer import NumberedProblems, ProducerState, RolloutProducer
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.checkpoint_files import read_state, step_folder
from rl.training.failures import CheckpointError
from rl.types import LoopPosition
from rl.utils.errors import RunError
from rl.utils.processes import RandomStates, process_states, restore_process_states

ATTACHMENT = "loop.pickle"
"""Name of the loop's file in a checkpoint."""
CONTROLLER = "controller"
"""Name of the random states of the loop's own process."""
ANSWER_S = 30.0
"""Seconds for a trainer to drop its gradient after an error, before the loop gives up saving."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoopState:
    """State of a loop that has done `position.step` steps."""

    position: LoopPosition
    held: ProducerState = field(default_factory=ProducerState)
    """Finished groups; groups under way are in `position.outstanding` and are generated again."""
    num_empty_steps: int = 0
    """Consecutive steps without a policy gradient."""
    step_of_version: Mapping[int, int] = field(default_factory=dict)
    """The step after which each policy version was published, for all versions that tokens of `held` may have."""
    drawn_with: str = ""
    """Fingerprint of the settings that rollouts depend on; `held` is of no use with other settings."""
    random_states: Mapping[str, bytes] = field(default_factory=dict)
    """Random states by name of the process."""

    @property
    def to_draw(self) -> LoopPosition:
        """The position of the problems: finished groups are not generated again."""
        finished = {group.number for group, _ in self.held.finished}
        left = tuple(number for number in self.position.outstanding if number not in finished)
        return replace(self.position, outstanding=left)

    def fit(self, drawn_with: str) -> LoopState:
        """Return the state without its finished groups if they were generated with other settings."""
        if drawn_with == self.drawn_with:
            return self
        if self.held.finished or self.held.dropped:
            logger.warning(
                "%d finished groups of the checkpoint were generated with other settings than this run's: they "
                "are generated again",
                len(self.held.finished),
            )
        return replace(self, held=ProducerState(), drawn_with=drawn_with)


def read_loop_state(folder: str | Path) -> LoopState | None:
    """Return the loop's state of a checkpoint, or None if no loop saved it.

    The file is unpickled: the caller has verified its checksum.
    """
    position = read_state(folder).position
    if position is None:
        return None
    file = Path(folder) / ATTACHMENT
    if not file.is_file():
        return LoopState(position=position)
    try:
        state = pickle.loads(file.read_bytes())
        assert isinstance(state, LoopState)
        return replace(state, position=position)
    except Exception as error:  # noqa: BLE001  (its classes have changed since, which may raise anything)
        logger.warning(
            "%s is of another version of the code (%r): finished groups are generated again", file, error
        )
        return LoopState(position=position)


class Progress:
    """Steps and evaluations that a running loop has done; `now` is its state between two steps."""

    def __init__(
        self,
        *,
        config: LoopConfig,
        problems: NumberedProblems,
        producer: RolloutProducer,
        start: LoopState,
    ) -> None:
        """`start` is the state of an earlier loop, or that of a loop without steps."""
        self._config = config
        self._problems = problems
        self._producer = producer
        self.done = start.position.step
        """Completed steps."""
        self.evaluated = not config.eval_every or start.position.evaluated
        """True if no evaluation is due before the next step."""
        self.num_empty_steps = start.num_empty_steps
        self.step_of_version = dict(start.step_of_version)
        """The step after which each policy version was published."""
        self.has_batch = False
        """True while a step trains on its batch."""
        self.whole: LoopState | None = self.now()
        """State after the last completed step; None while the trainer's weights are between two steps."""

    def now(self) -> LoopState:
        """Return the state, with all groups that have finished since the last step."""
        position = self._problems.position(self.done, outstanding=self._producer.bound.outstanding)
        oldest = self.done - self._config.max_off_policy_steps
        return LoopState(
            position=replace(position, evaluated=self.evaluated),
            held=self._producer.state(),
            num_empty_steps=self.num_empty_steps,
            step_of_version={v: step for v, step in self.step_of_version.items() if step >= oldest},
        )

    def step_ended(self, step: int, *, has_gradient: bool) -> None:
        self.done = step
        self.has_batch = False
        self.evaluated = not self._config.evaluates(step)
        self.num_empty_steps = 0 if has_gradient else self.num_empty_steps + 1
        self.whole = self.now()

    def evaluation_ended(self) -> None:
        self.evaluated = True
        if self.whole is not None:
            self.whole = replace(self.whole, position=replace(self.whole.position, evaluated=True))


class FlushedRecords(Protocol):
    """A file of records that has to be on disk before a checkpoint that counts its lines."""

    @property
    def num_records(self) -> int: ...

    async def flush_to_disk(self) -> None:
        """Return when the records would survive a power failure."""
        ...


@dataclass(kw_only=True, slots=True)
class StepCheckpoints:
    """Checkpoints of a loop, `folder/step-<n>`: when they are due, and what the loop adds to the trainer's."""

    trainer: Trainer
    config: CheckpointConfig
    folder: str
    records: FlushedRecords | None = None
    processes: RandomStates | None = None
    """Processes other than the trainer's and the loop's whose random states are saved."""
    can_answer: Callable[[Exception], bool] = field(default=lambda error: True)
    """Returns True if the trainer can still be called after an error of the loop."""
    drawn_with: str = ""
    """Fingerprint of the settings that rollouts depend on."""
    last_saved: int | None = None
    """Step of the last checkpoint, or of the checkpoint that the loop continues from."""

    def is_due(self, step: int, *, last: bool = False) -> bool:
        return step != self.last_saved and self.config.due(step, last=last)

    async def save(self, state: LoopState, *, last: bool = False, wait: bool = False) -> None:
        """Save the trainer, which has done the steps of `state`; always wait for the last checkpoint."""
        others = {} if self.processes is None else await self.processes.random_states()
        random_states = {CONTROLLER: process_states(), **others}
        state = replace(state, random_states=random_states, drawn_with=self.drawn_with)
        if self.records is not None:
            await self.records.flush_to_disk()
            position = replace(state.position, num_records=self.records.num_records)
            state = replace(state, position=position)
        step = state.position.step
        await self.trainer.save_checkpoint(
            str(step_folder(self.folder, step)),
            position=state.position,
            model_only=last and self.config.last_save_model_only,
            wait=wait or last,
            attachments={ATTACHMENT: pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)},
        )
        self.last_saved = step

    def would_save(self, step: int) -> bool:
        """Return True if a loop that ends early after `step` has unsaved progress that may be saved."""
        return self.config.saves and step > 0 and step != self.last_saved

    async def save_after(self, error: Exception, state: LoopState) -> None:
        """Save a loop that ends with an error if the trainer still answers; only log what fails."""
        step = state.position.step
        if isinstance(error, CheckpointError) or not self.would_save(step) or not self.can_answer(error):
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.trainer.drop_gradient()
            await self.save(state, wait=True)
            logger.info("step %d is saved before the run ends", step)
        except (RunError, OSError, TimeoutError) as problem:
            logger.warning("step %d is not saved before the run ends: %s", step, problem)

    async def restore_random_states(self, state: LoopState) -> None:
        """Restore the random states of all processes but the trainer's, which restores its own."""
        states = dict(state.random_states)
        if (own := states.pop(CONTROLLER, None)) is not None:
            restore_process_states(own)
        if states and self.processes is not None:
            await self.processes.restore_random_states(states)
