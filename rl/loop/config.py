"""Settings of the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl.config.configurable import Configurable, unless
from rl.config.tree import check_bounds
from rl.rollouts.advantage import Advantage, KLReward, OverlongPunishment
from rl.rollouts.episode import EpisodeLimits, Sampling
from rl.rollouts.evaluation import Evaluation


@dataclass(kw_only=True, slots=True)
class LoopConfig(Configurable.Config):
    """Settings of a `Loop`, where they are called `Loop.Config`."""

    num_steps: int = 100
    """Rounds of generate, train and publish; each has `num_minibatches` optimizer steps."""
    groups_per_batch: int = 32
    """Prompts of a step."""
    group_size: int = 8
    """Completions of each prompt; 1 needs an advantage that compares no group (`baseline`
    "batch_mean" or "none").
    """
    num_minibatches: int = 1
    """Optimizer steps that a batch is divided into, by prompts."""
    max_off_policy_steps: int = 0
    """Largest number of training steps between the weights that generated a token and the weights
    that train on it. 0: generation and training take turns; above 0, generation runs ahead by up to
    this many steps, as `rl.rollouts.staleness` proves."""
    publish_every: int = 1
    """Steps between two publications of the weights; needs `max_off_policy_steps` of at least one
    less.
    """
    sampling: Sampling = field(default_factory=Sampling)
    episode: EpisodeLimits = field(default_factory=EpisodeLimits)
    advantage: Advantage = field(default_factory=Advantage)
    overlong: OverlongPunishment = field(default_factory=OverlongPunishment)
    kl_reward: KLReward = field(default_factory=KLReward)
    drop_zero_advantage_groups: bool = False
    """Replace a group whose rewards are all equal, which has no policy gradient, by the group of
    another prompt (DAPO's dynamic sampling). False: the group counts in the averages of a step,
    with advantage 0.
    """
    max_sample_tokens: int | None = None
    """Limit of a sample's tokens, prompt included; None: what generator and trainer can process."""
    long_samples: Literal["drop_group", "drop", "truncate"] = field(
        default="drop_group", metadata=unless("max_sample_tokens", None)
    )
    """Treatment of samples above `max_sample_tokens`, which are always counted. drop_group: the
    group of another prompt replaces theirs; drop: they are left out after they have counted for
    their group's advantages; truncate: only their first tokens are trained on."""
    mask_truncated_completions: bool = False
    """Leave rollouts that ran out of tokens out of the loss (DAPO's overlong filtering): what they
    would have said is unknown. They count for their group's advantages and as sequences of a loss's
    divisor, not as its tokens.
    """
    long_prompts: Literal["stop", "drop"] = "stop"
    """Treatment of a prompt that leaves no room for a reply. stop: the run ends with an error that
    names the problem; drop: another problem replaces it."""
    max_failed_rewards: float = 0.0
    """Largest share of rewards that may fail (raise, time out, not finite) before the run stops.
    The share is taken of the rewards since the last batch, or of a step's where those are fewer,
    and of each evaluation set. Failed rewards are counted and not trained on."""
    max_empty_steps: int = 20
    """Largest number of consecutive steps without any policy gradient (equal rewards in every
    group) before the run stops with a message; also the number of steps' worth of consecutive
    dropped groups."""
    max_logprob_diff: float = float("inf")
    """Largest mean difference, in nats a token, between the logprobs of trainer and generator under
    the same weights before the run stops. A difference beyond rounding means that the weights are
    not the same.
    """
    eval_every: int = 20
    """Steps between evaluations, which also run before the first and after the last step. 0: none.
    """
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=unless("eval_every", 0))

    def is_evaluation_due(self, step: int) -> bool:
        """Return True if an evaluation is due after this step."""
        every = self.eval_every
        return bool(every) and (step % every == 0 or step == self.num_steps)

    def is_push_due(self, step: int) -> bool:
        """Return True if the weights are pushed after this step; an evaluation needs them."""
        return step % self.publish_every == 0 or self.is_evaluation_due(step)

    def __post_init__(self) -> None:
        # A run of 0 steps only warms up, evaluates and exports.
        check_bounds(self, "num_steps", "eval_every", at_least=0)
        check_bounds(
            self, "max_empty_steps", "max_logprob_diff", "max_off_policy_steps", at_least=0
        )
        check_bounds(
            self, "groups_per_batch", "group_size", "num_minibatches", "publish_every", at_least=1
        )
        check_bounds(self, "max_failed_rewards", at_least=0, below=1)
        check_bounds(self, "max_sample_tokens", at_least=2)
