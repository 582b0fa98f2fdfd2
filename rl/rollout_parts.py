"""What draws, scores and collects the rollouts of a loop, made of its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.loop_config import LoopConfig
from rl.loop_state import LoopState
from rl.protocols import Sampler, Scorer
from rl.rollouts.age_bound import AgeBound
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.episodes import Episodes
from rl.rollouts.evaluation import Evaluator
from rl.rollouts.group import RolloutWorker
from rl.rollouts.numbered_problems import NumberedProblems
from rl.rollouts.producer import FailedRewards, GroupFilter, RolloutProducer
from rl.rollouts.renderer import Renderer
from rl.tasks.task import Task
from rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """Makes them; each is made once, by the loop."""

    config: LoopConfig
    sampler: Sampler
    scorer: Scorer
    renderer: Renderer
    task: Task
    max_sequence_tokens: int
    """Of one sequence, that generator and trainer can take."""
    seed: int
    threads: EnvironmentThreads = field(default_factory=EnvironmentThreads)
    """Of training and evaluation, so that what a task shares among its episodes is of one event loop."""

    def sampling(self) -> SamplingParams:
        """Of training."""
        sampling = self.config.sampling
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            num_samples=self.config.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
        )

    def episodes(self) -> Episodes:
        """With clocks and counters of their own."""
        return Episodes(
            sampler=self.sampler,
            renderer=self.renderer,
            environment=self.task.environment,
            limits=self.config.episode,
            max_tokens=self.max_sequence_tokens,
            threads=self.threads,
        )

    def evaluator(self) -> Evaluator:
        return Evaluator(
            sets=self.task.eval_sets(),
            episodes=self.episodes(),
            scorer=self.scorer,
            settings=self.config.evaluation,
            sampling=self.sampling(),
            max_failed=self.config.max_failed_rewards,
        )

    def worker(self) -> RolloutWorker:
        return RolloutWorker(
            episodes=self.episodes(),
            scorer=self.scorer,
            sampling=self.sampling(),
            seed=self.seed,
            overlong=self.config.overlong,
            drop_long_prompts=self.config.long_prompts == "drop",
        )

    def problems(self, state: LoopState | None) -> NumberedProblems:
        """Those of training, from where an earlier loop stood."""
        position = None if state is None else state.to_draw
        return NumberedProblems(self.task.train_problems(seed=self.seed), position)

    def producer(
        self, worker: RolloutWorker, problems: NumberedProblems, state: LoopState | None
    ) -> RolloutProducer:
        config = self.config
        limit = config.max_sample_tokens if config.long_samples == "drop_group" else None
        return RolloutProducer(
            bound=AgeBound(
                max_age=config.max_policy_age,
                num_prompts=config.num_prompts,
                num_steps=config.num_steps,
                step=0 if state is None else state.position.step,
            ),
            worker=worker.run,
            problems=problems,
            group_filter=GroupFilter(drop_equal=config.equal_groups == "drop", max_sample_tokens=limit),
            failed_rewards=FailedRewards(
                max_share=config.max_failed_rewards, rewards_of_step=config.num_prompts * config.num_samples
            ),
            max_dropped=config.max_empty_steps * config.num_prompts,
            held=None if state is None else state.held,
        )
