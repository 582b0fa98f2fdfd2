"""Named algorithms: functions that edit a config in a few lines, and sum-digits on a CPU with each
of them.

    python -m rl.train --module algorithms --config tiny_gspo
    config = dapo(my_config())

An algorithm is a loss, an advantage and the treatment of groups; model, task and optimizer stay
unchanged. Losses and advantages are described in docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from actors.controller import Controller
from configs import sum_digits
from losses.policy import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    DROLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    PolicyLoss,
    PPOLoss,
    ReinforcePlusPlusLoss,
    RLOOLoss,
)
from rl.rollouts.advantage import Advantage, KLReward, OverlongPunishment


def grpo(config: Controller.Config) -> Controller.Config:
    """Rewards minus their group's mean, divided by its standard deviation; every sequence has the
    same weight.

    Add the paper's KL term with `with_kl`.
    """
    # As in the paper; `GRPOLoss` has another default.
    return _set(config, GRPOLoss(normalization="sequence_mean"), Advantage(scale="group_std"))


def dr_grpo(config: Controller.Config) -> Controller.Config:
    """GRPO without the divisions by the standard deviation and by the length.

    The constant divisor is `loop.sampling.max_tokens`. To change that on the command line, also set
    `--trainer.loss.tokens_per_sequence`.
    """
    return _set(
        config, DrGRPOLoss(tokens_per_sequence=config.loop.sampling.max_tokens), Advantage()
    )


def dapo(config: Controller.Config) -> Controller.Config:
    """A higher upper clip bound, the mean over tokens, dynamic sampling, and the soft overlong
    punishment.
    """
    # Dynamic sampling: groups whose rewards are all equal have no gradient.
    config.loop.drop_zero_advantage_groups = True
    config.loop.overlong = OverlongPunishment(enable=True, buffer_tokens=None)
    return _set(config, DAPOLoss(), Advantage(scale="group_std"))


def gspo(config: Controller.Config) -> Controller.Config:
    """Ratios and clip bounds for whole sequences."""
    return _set(config, GSPOLoss(), Advantage(scale="group_std"))


def cispo(config: Controller.Config) -> Controller.Config:
    """Clipped ratios that keep their gradient."""
    return _set(config, CISPOLoss(), Advantage(scale="group_std"))


def rloo(config: Controller.Config) -> Controller.Config:
    """A whole sequence as one action, with the mean of the group's other rewards as baseline."""
    return _set(config, RLOOLoss(), Advantage(baseline="leave_one_out"))


def reinforce_plus_plus(config: Controller.Config) -> Controller.Config:
    """Returns of each token, with a KL penalty to the initial policy, whitened over all tokens of
    the batch.
    """
    config.loop.kl_reward = KLReward(coef=0.001)
    config.trainer.reference.enable = True
    advantage = Advantage(baseline="batch_mean", scale="batch_std", credit="token")
    return _set(config, ReinforcePlusPlusLoss(), advantage)


def reinforce_plus_plus_baseline(config: Controller.Config) -> Controller.Config:
    """Rewards minus their group's mean, divided by the batch's standard deviation.

    Add the paper's KL term with `with_kl` and the estimator k2.
    """
    return _set(config, ReinforcePlusPlusLoss(), Advantage(scale="batch_std"))


def ppo(config: Controller.Config) -> Controller.Config:
    """PPO's clipping, with rewards whitened over the batch instead of a critic."""
    return _set(config, PPOLoss(), Advantage(baseline="batch_mean", scale="batch_std"))


def importance_sampling(config: Controller.Config) -> Controller.Config:
    """The policy gradient with an importance ratio and no clipping."""
    return _set(config, ImportanceSamplingLoss(), Advantage())


def dro(config: Controller.Config) -> Controller.Config:
    """A regression that keeps the policy close to the policy that generated the data."""
    return _set(config, DROLoss(), Advantage())


def with_kl(
    config: Controller.Config, *, coef: float, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Controller.Config:
    """Add a KL penalty to the initial policy to the loss; call it after the algorithm's
    function.
    """
    # The estimator needs the logprobs of a reference, which only policy losses take.
    loss = config.trainer.loss
    if not isinstance(loss, PolicyLoss):
        raise ValueError(f"trainer.loss={loss!r}: only a policy loss has a KL term")
    loss.kl_coef = coef
    loss.kl_estimator = estimator
    config.trainer.reference.enable = True
    return config


def _build_tiny(
    algorithm: Callable[[Controller.Config], Controller.Config],
) -> Callable[[], Controller.Config]:
    # A function and no config: each call must give a fresh config, which callers edit.
    def tiny() -> Controller.Config:
        config = algorithm(sum_digits.tiny())
        config.description = (
            f"Qwen3 of 0.8M parameters on sum-digits, on a CPU, with {algorithm.__name__}"
        )
        return config

    return tiny


tiny_grpo = _build_tiny(grpo)
tiny_dr_grpo = _build_tiny(dr_grpo)
tiny_dapo = _build_tiny(dapo)
tiny_gspo = _build_tiny(gspo)
tiny_cispo = _build_tiny(cispo)
tiny_rloo = _build_tiny(rloo)
tiny_reinforce_plus_plus = _build_tiny(reinforce_plus_plus)
tiny_importance_sampling = _build_tiny(importance_sampling)
tiny_dro = _build_tiny(dro)


def tiny_reinforce_plus_plus_baseline() -> Controller.Config:
    return with_kl(_build_tiny(reinforce_plus_plus_baseline)(), coef=0.001, estimator="k2")


def tiny_ppo() -> Controller.Config:
    """Four optimizer steps on each batch of rollouts, so that clipping has an effect."""
    config = _build_tiny(ppo)()
    config.loop.num_minibatches = 4
    return config


def _set(config: Controller.Config, loss: PolicyLoss, advantage: Advantage) -> Controller.Config:
    config.trainer.loss = loss
    config.loop.advantage = advantage
    return config
