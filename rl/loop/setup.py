"""What a loop's rollouts are made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rl.agents.rollouts import AgentEpisodes, AgentPlayer
from rl.loop.config import LoopConfig
from rl.protocols import Rewarder, TokenGenerator
from rl.rollouts.bundles import EpisodeRoom
from rl.rollouts.environment import Environments
from rl.rollouts.episode import Episodes
from rl.rollouts.evaluation import Evaluator
from rl.rollouts.group import RolloutWorker
from rl.rollouts.renderer import Renderer
from rl.tasks.task import Task
from rl.types import SamplingParams
from rl.utils.clock import BusyClock
from rl.utils.threads import LoopThread


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSetup:
    """Parts of a loop's rollouts, besides the loop's own settings."""

    generator: TokenGenerator
    rewarder: Rewarder
    renderer: Renderer
    task: Task
    max_sequence_tokens: int
    """Longest sequence that generator and trainer can process, in tokens."""
    seed: int
    room: EpisodeRoom | None = None
    """What must hold all rows of an episode; None: the loss may see them apart."""
    thread: LoopThread = field(default_factory=lambda: LoopThread("environments"))
    """Event loop of the environments, shared by training and evaluation."""
    agents: AgentPlayer | None = None
    """Player of a task whose episodes are agents; None: they have environments."""

    def build(self, config: LoopConfig) -> tuple[RolloutWorker, Evaluator]:
        """Return the worker that makes scored groups of training problems, and the evaluator."""
        sampling = SamplingParams(
            max_tokens=config.sampling.max_tokens,
            num_samples=config.group_size,
            temperature=config.sampling.temperature,
            stop_token_ids=self.renderer.stop_token_ids,
        )

        episodes = self._make_episodes(config)
        worker = RolloutWorker(
            episodes=episodes,
            rewarder=self.rewarder,
            sampling=sampling,
            seed=self.seed,
            overlong=config.overlong,
            drop_long_prompts=config.long_prompts == "drop",
        )
        evaluator = Evaluator(
            sets=self.task.eval_sets(),
            # A clock of its own: the time and tokens of evaluations do not count in a step's speed.
            episodes=replace(episodes, generating=BusyClock()),
            rewarder=self.rewarder,
            settings=config.evaluation,
            sampling=sampling,
            max_failed=config.max_failed_rewards,
        )
        return worker, evaluator

    def _make_episodes(self, config: LoopConfig) -> Episodes | AgentEpisodes:
        if self.agents is not None:
            return AgentEpisodes(
                generator=self.generator,
                player=self.agents,
                limits=config.episode,
                max_tokens=self.max_sequence_tokens,
                choose=getattr(self.task, "choose_branches", None),
            )
        return Episodes(
            generator=self.generator,
            renderer=self.renderer,
            environments=Environments(
                make=self.task.environment,
                step_timeout_s=config.episode.step_timeout_s,
                thread=self.thread,
            ),
            limits=config.episode,
            max_tokens=self.max_sequence_tokens,
        )
