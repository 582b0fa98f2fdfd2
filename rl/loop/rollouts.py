"""The parts that generate, score and collect a loop's rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rl.loop.config import LoopConfig
from rl.loop.state import LoopState
from rl.protocols import Rewarder, TokenGenerator
from rl.rollouts.environment import EnvironmentThread
from rl.rollouts.episode import Episodes
from rl.rollouts.evaluation import Evaluator
from rl.rollouts.group import RolloutWorker
from rl.rollouts.producer import FailedRewards, NumberedProblems, RolloutProducer, reason_to_drop
from rl.rollouts.renderer import Renderer
from rl.rollouts.staleness import StalenessBound
from rl.tasks.task import Task
from rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSetup:
    """Everything that a loop's rollouts are made with, besides the loop's own settings."""

    generator: TokenGenerator
    rewarder: Rewarder
    renderer: Renderer
    task: Task
    max_sequence_tokens: int
    """Longest sequence that generator and trainer can process, in tokens."""
    seed: int
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    """Event loops of the environments, shared by training and evaluation."""

    def worker(self, config: LoopConfig) -> RolloutWorker:
        """Return the worker that turns a training problem into a scored group."""
        return RolloutWorker(
            episodes=self._episodes(config),
            rewarder=self.rewarder,
            sampling=self._sampling(config),
            seed=self.seed,
            overlong=config.overlong,
            drop_long_prompts=config.long_prompts == "drop",
        )

    def problems(self, state: LoopState | None) -> NumberedProblems:
        """Return the training problems, from the position of an earlier loop on."""
        position = None if state is None else state.to_draw
        return NumberedProblems(self.task.train_problems(seed=self.seed), position)

    def producer(
        self,
        config: LoopConfig,
        *,
        worker: RolloutWorker,
        problems: NumberedProblems,
        state: LoopState | None,
    ) -> RolloutProducer:
        """Return the producer of batches, with the finished groups of an earlier loop."""
        limit = config.max_sample_tokens if config.long_samples == "drop_group" else None
        return RolloutProducer(
            bound=StalenessBound(
                max_off_policy_steps=config.max_off_policy_steps,
                groups_per_batch=config.groups_per_batch,
                num_steps=config.num_steps,
                step=0 if state is None else state.position.step,
            ),
            worker=worker.run,
            problems=problems,
            reason_to_drop=partial(
                reason_to_drop, drop_equal=config.drop_zero_advantage_groups, max_sample_tokens=limit
            ),
            failed_rewards=FailedRewards(
                max_share=config.max_failed_rewards,
                rewards_of_step=config.groups_per_batch * config.group_size,
            ),
            max_dropped=config.max_empty_steps * config.groups_per_batch,
            state=None if state is None else state.held,
        )

    def evaluator(self, config: LoopConfig) -> Evaluator:
        return Evaluator(
            sets=self.task.eval_sets(),
            episodes=self._episodes(config),
            rewarder=self.rewarder,
            settings=config.evaluation,
            sampling=self._sampling(config),
            max_failed=config.max_failed_rewards,
        )

    def _sampling(self, config: LoopConfig) -> SamplingParams:
        return SamplingParams(
            max_tokens=config.sampling.max_tokens,
            num_samples=config.group_size,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
        )

    def _episodes(self, config: LoopConfig) -> Episodes:
        """Return episodes with their own clocks and counters."""
        return Episodes(
            generator=self.generator,
            renderer=self.renderer,
            environment=self.task.environment,
            limits=config.episode,
            max_tokens=self.max_sequence_tokens,
            thread=self.thread,
        )
