"""The settings of the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl.config.configurable import Configurable
from rl.config.effect import unless
from rl.rollouts.advantage import Advantage
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.overlong import OverlongPunishment
from rl.rollouts.settings import EpisodeLimits, Evaluation, Sampling

_AT_LEAST_0 = ("num_steps", "eval_every", "max_empty_steps", "max_logprob_diff", "max_policy_age")


@dataclass(kw_only=True, slots=True)
class LoopConfig(Configurable.Config):
    num_steps: int = 100
    """Optimizer steps times `num_minibatches`: rounds of generate, train, publish."""
    num_prompts: int = 32
    """Prompts of a step."""
    num_samples: int = 8
    """Completions of each prompt: a group."""
    num_minibatches: int = 1
    """Optimizer steps a round of rollouts is cut into, by prompts."""
    max_policy_age: int = 0
    """Steps of training by which the weights that drew a token may be older than those it trains. 0:
    generation and training take turns; above, generation runs ahead by as many steps."""
    publish_every: int = 1
    """Steps between two publishes of the weights; needs a `max_policy_age` of one less, or more."""
    sampling: Sampling = field(default_factory=Sampling)
    episode: EpisodeLimits = field(default_factory=EpisodeLimits)
    advantage: Advantage = field(default_factory=Advantage)
    overlong: OverlongPunishment = field(default_factory=OverlongPunishment)
    kl_reward: KLReward = field(default_factory=KLReward)
    equal_groups: Literal["train", "drop"] = "train"
    """Groups of equal rewards have no policy gradient. train: they take part, with advantage 0, in the
    averages of a step; drop: another prompt takes their place, as in DAPO's dynamic sampling."""
    max_sample_tokens: int | None = None
    """Longer samples, prompt included, are too long; None: as long as generator and trainer can take."""
    long_samples: Literal["drop_group", "drop", "truncate"] = field(
        default="drop_group", metadata=unless("max_sample_tokens", None)
    )
    """What becomes of those. drop_group: another prompt takes the place of their group; drop: they are left
    out, after they have counted for the advantages of their group; truncate: only their first tokens are
    trained on. All are counted."""
    long_prompts: Literal["stop", "drop"] = "stop"
    """What becomes of a prompt that leaves no room for a reply. stop: the run ends, with an error that
    names the problem; drop: another takes its place."""
    max_failed_rewards: float = 0.0
    """Share of the rewards since the last step's batch, or of a step's where those are fewer, that may fail
    (raise, time out, not finite) before the run stops; a failed one is counted and not trained on.
    Of each set of an evaluation the same share may."""
    max_empty_steps: int = 20
    """Steps in a row without any policy gradient (equal rewards in every group) before the
    run stops with a message; also steps' worth of groups that are dropped in a row."""
    max_logprob_diff: float = float("inf")
    """Largest mean difference, in nats a token, between the logprobs of trainer and generator on tokens of
    the same weights, before the run stops: beyond rounding it means that they do not hold the same."""
    eval_every: int = 20
    """Steps between evaluations; also before the first and after the last step. 0: none."""
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=unless("eval_every", 0))

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after this step; that before the first is due wherever any is."""
        every = self.eval_every
        return bool(every) and (step % every == 0 or step == self.num_steps)

    def publishes(self, step: int) -> bool:
        """Whether the weights are published after this step; those before the first always are."""
        return step % self.publish_every == 0 or self.evaluates(step)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_0:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not at least 0")
        if self.num_prompts < 1 or self.num_samples < 2:
            raise ValueError(
                f"num_prompts={self.num_prompts}, num_samples={self.num_samples}: a step needs at least "
                "1 prompt and 2 samples of each, whose mean is the baseline"
            )
        if self.num_minibatches < 1 or self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} does not divide num_prompts={self.num_prompts}"
            )
        if not 0 <= self.max_failed_rewards < 1:
            raise ValueError(f"max_failed_rewards={self.max_failed_rewards} is not in [0, 1)")
        if self.publish_every < 1:
            raise ValueError(f"publish_every={self.publish_every} is less than 1")
        if self.max_policy_age < self.publish_every - 1:
            raise ValueError(
                f"max_policy_age={self.max_policy_age} is a bound that no batch can meet with publish_every="
                f"{self.publish_every}: the last step before a publish trains on tokens of weights that are "
                f"{self.publish_every - 1} steps old; must be at least {self.publish_every - 1}"
            )
        if self.max_sample_tokens is not None and self.max_sample_tokens < 2:
            raise ValueError(
                f"max_sample_tokens={self.max_sample_tokens}: must be at least 2, a token of a prompt and "
                "one of its completion, or None"
            )
