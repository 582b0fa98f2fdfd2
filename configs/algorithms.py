"""Named algorithms: a few lines each that edit a config, and sum-digits on a CPU with each of them.

    python -m rl.train --module algorithms --config tiny_gspo
    config = dapo(my_config())

An algorithm is a loss, an advantage and what the loop does with groups; the model, the task and the optimizer
stay as they are. What each loss and advantage is: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from actors.controller import Controller
from configs import sum_digits
from losses.cispo import CISPOLoss
from losses.dapo import DAPOLoss
from losses.dr_grpo import DrGRPOLoss
from losses.dro import DROLoss
from losses.grpo import GRPOLoss
from losses.gspo import GSPOLoss
from losses.importance_sampling import ImportanceSamplingLoss
from losses.policy import PolicyLoss
from losses.ppo import PPOLoss
from losses.reinforce_plus_plus import ReinforcePlusPlusLoss
from losses.rloo import RLOOLoss
from rl.rollouts.advantage import Advantage
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.overlong import OverlongPunishment


def grpo(config: Controller.Config) -> Controller.Config:
    """Rewards less their group's mean, over its deviation; each sequence counts alike. KL: `with_kl`."""
    config.trainer.loss = GRPOLoss(normalization="sequence_mean")
    config.loop.advantage = Advantage(scale="group_std")
    return config


def dr_grpo(config: Controller.Config) -> Controller.Config:
    """GRPO without its two divisions: by the deviation, and by the length.

    The constant is the config's length here: who sets another on the command line sets
    `--trainer.loss.tokens_per_sequence` too.
    """
    config.trainer.loss = DrGRPOLoss(tokens_per_sequence=config.loop.sampling.max_tokens)
    config.loop.advantage = Advantage()
    return config


def dapo(config: Controller.Config) -> Controller.Config:
    """A higher upper bound, the mean over tokens, groups of equal rewards replaced by others, and less reward
    for replies that end in the last quarter of the tokens they may have."""
    config.trainer.loss = DAPOLoss()
    config.loop.advantage = Advantage(scale="group_std")
    config.loop.equal_groups = "drop"
    config.loop.overlong = OverlongPunishment(enable=True, buffer_tokens=None)
    return config


def gspo(config: Controller.Config) -> Controller.Config:
    """Ratios and bounds of whole sequences."""
    config.trainer.loss = GSPOLoss()
    config.loop.advantage = Advantage(scale="group_std")
    return config


def cispo(config: Controller.Config) -> Controller.Config:
    """Ratios that are cut and go on giving gradient."""
    config.trainer.loss = CISPOLoss()
    config.loop.advantage = Advantage(scale="group_std")
    return config


def rloo(config: Controller.Config) -> Controller.Config:
    """A whole sequence as one action, against the mean of the group's others."""
    config.trainer.loss = RLOOLoss()
    config.loop.advantage = Advantage(baseline="leave_one_out")
    return config


def reinforce_plus_plus(config: Controller.Config) -> Controller.Config:
    """Returns by token, a KL divergence from the starting policy among them, whitened over all tokens of the
    batch."""
    config.trainer.loss = ReinforcePlusPlusLoss()
    config.loop.advantage = Advantage(baseline="batch_mean", scale="batch_std", credit="token")
    config.loop.kl_reward = KLReward(coef=0.001)
    config.trainer.reference.enable = True
    return config


def reinforce_plus_plus_baseline(config: Controller.Config) -> Controller.Config:
    """Rewards less their group's mean, over the batch's deviation. Its KL: `with_kl` with k2."""
    config.trainer.loss = ReinforcePlusPlusLoss()
    config.loop.advantage = Advantage(scale="batch_std")
    return config


def ppo(config: Controller.Config) -> Controller.Config:
    """PPO's clip with rewards whitened over the batch in the place of a critic."""
    config.trainer.loss = PPOLoss()
    config.loop.advantage = Advantage(baseline="batch_mean", scale="batch_std")
    return config


def importance_sampling(config: Controller.Config) -> Controller.Config:
    """The policy gradient with an importance ratio and no bound."""
    config.trainer.loss = ImportanceSamplingLoss()
    config.loop.advantage = Advantage()
    return config


def dro(config: Controller.Config) -> Controller.Config:
    """A regression that holds the policy near what drew the data."""
    config.trainer.loss = DROLoss()
    config.loop.advantage = Advantage()
    return config


def with_kl(
    config: Controller.Config, *, coef: float, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Controller.Config:
    """Adds a KL divergence from the starting policy to the loss; after the algorithm."""
    loss = config.trainer.loss
    if not isinstance(loss, PolicyLoss):
        raise ValueError(f"trainer.loss={loss!r}: must be a policy loss, to have a KL term")
    loss.kl_coef, loss.kl_estimator = coef, estimator
    config.trainer.reference.enable = True
    return config


def tiny_grpo() -> Controller.Config:
    return _tiny(grpo)


def tiny_dr_grpo() -> Controller.Config:
    return _tiny(dr_grpo)


def tiny_dapo() -> Controller.Config:
    return _tiny(dapo)


def tiny_gspo() -> Controller.Config:
    return _tiny(gspo)


def tiny_cispo() -> Controller.Config:
    return _tiny(cispo)


def tiny_rloo() -> Controller.Config:
    return _tiny(rloo)


def tiny_reinforce_plus_plus() -> Controller.Config:
    return _tiny(reinforce_plus_plus)


def tiny_reinforce_plus_plus_baseline() -> Controller.Config:
    return with_kl(_tiny(reinforce_plus_plus_baseline), coef=0.001, estimator="k2")


def tiny_ppo() -> Controller.Config:
    """Four optimizer steps on each round of rollouts, which is what the clip is for."""
    config = _tiny(ppo)
    config.loop.num_minibatches = 4
    return config


def tiny_importance_sampling() -> Controller.Config:
    return _tiny(importance_sampling)


def tiny_dro() -> Controller.Config:
    return _tiny(dro)


def _tiny(algorithm: Callable[[Controller.Config], Controller.Config]) -> Controller.Config:
    config = algorithm(sum_digits.tiny())
    config.description = f"Qwen3 of 0.8M parameters on sum-digits, on a CPU, with {algorithm.__name__}"
    return config
