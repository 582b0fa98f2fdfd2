"""The reference policy: the starting weights, frozen, whose logprobs a KL term compares with.

It is laid out as the policy is, and its parameters are kept in the dtype that forward and backward
compute in: on the first update its logprobs are the policy's, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from losses.types import Loss
from rl.distributed.shards import local_tensor
from rl.models.buffers import persistent_buffers
from rl.rollouts.packing import PackedBatch
from rl.training.config import TrainingConfig
from rl.training.policy import Policy
from rl.types import TrainingSample


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Whether there is a reference policy."""

    enable: bool = False
    """Keep a frozen copy of the weights that training starts from, and compare the policy with it: one
    more forward a step and, on each rank, the parameters' size in param_dtype."""


def check_reference(config: ReferenceConfig, *, loss: Loss, kl_in_reward: bool = False) -> None:
    """Raise ValueError if something needs a reference policy and there is none, or the other way round.

    `kl_in_reward`: rewards are reduced by a KL divergence from it, whatever the loss.
    """
    uses = getattr(loss, "uses_reference", False)
    if kl_in_reward and not config.enable:
        raise ValueError(
            "a KL divergence in the reward needs the reference policy: reference.enable must be True"
        )
    if config.enable and not uses and not kl_in_reward:
        raise ValueError(
            f"reference.enable=True has no effect with loss {type(loss).__name__}, which has no KL term: "
            "must be False, or a loss that has one"
        )
    if config.enable or not uses:
        return
    _check_kl_fields(loss)


def _check_kl_fields(loss: Loss) -> None:
    if getattr(loss, "kl_coef", 0.0):
        raise ValueError(
            f"loss.kl_coef={loss.kl_coef} needs the reference policy: must be 0, or "  # type: ignore[attr-defined]
            "reference.enable True"
        )
    if not dataclasses.is_dataclass(loss):
        return
    for f in dataclasses.fields(loss):
        if f.name.startswith("kl_") and getattr(loss, f.name) != f.default:
            raise ValueError(
                f"loss.{f.name}={getattr(loss, f.name)!r} has no effect without the reference policy: "
                f"must be {f.default!r}, or reference.enable True"
            )


class ReferencePolicy:
    """Answers with logprobs, and has no gradient."""

    def __init__(self, policy: Policy) -> None:
        """`policy` is made as the one in training is, and is this object's alone."""
        self._policy = policy
        for parameter in policy.parameters.values():
            parameter.requires_grad_(False)

    @property
    def policy(self) -> Policy:
        """That answers."""
        return self._policy

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        """Take over the policy's weights, each rank its own shards."""
        for name, parameter in self._policy.parameters.items():
            local_tensor(parameter).copy_(local_tensor(policy.parameters[name]))
        buffers = persistent_buffers(policy.model)
        for name, buffer in persistent_buffers(self._policy.model).items():
            buffer.copy_(buffers[name])

    @torch.no_grad()
    def attach(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches with logprobs of the reference policy; those that samples brought stay."""
        attached = []
        for batch in batches:
            if batch.reference_logprobs is None:
                logprobs_T, _ = self._policy.forward(batch.to(self._policy.device))
                batch = replace(batch, reference_logprobs=logprobs_T)
            attached.append(batch)
        self._policy.release()
        return attached

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """As `Policy.logprobs`."""
        return self._policy.logprobs(samples)


def there(reference: ReferencePolicy | None) -> ReferencePolicy:
    """The reference policy; raises ValueError where there is none."""
    if reference is None:
        raise ValueError("there is no reference policy to ask: reference.enable is False, and must be True")
    return reference


def make_reference(
    config: ReferenceConfig, *, policy: Policy, build: Callable[[TrainingConfig], Policy]
) -> ReferencePolicy | None:
    """A frozen copy of `policy`, made by `build` as that was; None where there is to be none."""
    if not config.enable:
        return None
    reference = ReferencePolicy(build(replace(policy.training, dtype=policy.training.param_dtype)))
    reference.follow(policy)
    return reference


def with_reference(
    batches: list[PackedBatch], *, reference: ReferencePolicy | None, loss: Loss
) -> list[PackedBatch]:
    """`attach`, if there is a reference policy and the loss reads its logprobs."""
    if reference is None or not getattr(loss, "uses_reference", False):
        return batches
    return reference.attach(batches)
