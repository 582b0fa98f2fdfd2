"""What a loop has done, as whoever continues it needs to know."""

from __future__ import annotations

from dataclasses import replace

from rl.loop_config import LoopConfig
from rl.loop_state import LoopState
from rl.rollouts.numbered_problems import NumberedProblems
from rl.rollouts.producer import RolloutProducer


class Progress:
    """Kept by a loop, step by step."""

    def __init__(
        self,
        *,
        config: LoopConfig,
        problems: NumberedProblems,
        producer: RolloutProducer,
        state: LoopState | None,
    ) -> None:
        """`state` is of an earlier loop that is continued."""
        self._config = config
        self._problems = problems
        self._producer = producer
        self.done = 0 if state is None else state.position.step
        """Whole steps."""
        self.evaluated = not config.eval_every or (state is not None and state.position.evaluated)
        """Whether no evaluation is due before the next step."""
        self.num_empty_steps = 0 if state is None else state.num_empty_steps
        """Steps in a row without a policy gradient."""
        self.step_of_version = {} if state is None else dict(state.step_of_version)
        """Step after which each policy version was published, so that ages can be told."""
        self.trains = False
        """Whether a step is under way that has its batch."""
        self.whole: LoopState | None = self.now()
        """After the last whole step; None while the learner's weights are those of no whole step."""

    def now(self) -> LoopState:
        """Between two steps: with all groups that have finished since the last one."""
        position = self._problems.position(self.done, outstanding=self._producer.bound.outstanding)
        oldest = self.done - self._config.max_policy_age
        return LoopState(
            position=replace(position, evaluated=self.evaluated),
            held=self._producer.held(),
            num_empty_steps=self.num_empty_steps,
            step_of_version={v: step for v, step in self.step_of_version.items() if step >= oldest},
        )

    def step_begins(self) -> None:
        """It has its batch."""
        self.trains = True

    def step_ends(self, step: int, *, teaches: bool) -> None:
        """Its record is written; `teaches`: it had a policy gradient."""
        self.done = step
        self.trains = False
        self.evaluated = not self._config.evaluates(step)
        self.num_empty_steps = 0 if teaches else self.num_empty_steps + 1
        self.whole = self.now()

    def evaluation_ends(self) -> None:
        """Its record is written."""
        self.evaluated = True
        if self.whole is not None:
            self.whole = replace(self.whole, position=replace(self.whole.position, evaluated=True))
