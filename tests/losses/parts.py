"""Random micro-batches as losses take them, in several forms: packed, padded by sequence, one by one.

Shape legend: T packed tokens, B sequences, L tokens of the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from losses.cispo import CISPOLoss
from losses.cross_entropy import CrossEntropyLoss
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
from losses.types import Loss, LossInputs

WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PPOLoss(),
    "grpo": GRPOLoss(),
    "dr_grpo": DrGRPOLoss(tokens_per_sequence=7),
    "dapo": DAPOLoss(),
    "gspo": GSPOLoss(**WIDE),
    "gspo token": GSPOLoss(level="token", **WIDE),
    "cispo": CISPOLoss(clip_high=0.2),
    "rloo": RLOOLoss(clip_low=0.9, clip_high=5.0),
    "reinforce_plus_plus": ReinforcePlusPlusLoss(),
    "importance_sampling": ImportanceSamplingLoss(),
    "dro": DROLoss(beta=0.3),
}
"""Each with bounds within and beyond which some of the random ratios are."""
LOSSES: dict[str, Loss] = POLICY_LOSSES | {
    "cross_entropy": CrossEntropyLoss(),
    "weighted cross_entropy": CrossEntropyLoss(weights="advantages"),
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """[B, L] float64 each; what is not `mask` is NaN wherever it can be, except in the padded form."""

    logprobs: Tensor
    generator: Tensor
    reference: Tensor
    proximal: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, with what is masked in them."""
        return [int(row.nonzero().max()) + 2 for row in self.mask]


def random_batch(seed: int, *, num_sequences: int = 5, length: int = 9, by_token: bool = False) -> Batch:
    """Of sequences of different lengths, with gaps in their masks, as after tools' answers.

    Args:
        by_token: an advantage of its own for each token, else one for each sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return std * torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (num_sequences, length)
    logprobs = -2.0 + normal(*shape, std=0.5)
    mask = torch.rand(*shape, generator=generator) < 0.7
    ends = torch.randint(3, length, (num_sequences, 1), generator=generator)
    mask &= torch.arange(length) < ends
    mask[:, 1] = True
    advantages = normal(*shape) if by_token else normal(num_sequences, 1).expand(shape)
    return Batch(
        logprobs=logprobs,
        generator=logprobs + normal(*shape, std=0.3),
        reference=logprobs + normal(*shape, std=0.3),
        proximal=logprobs + normal(*shape, std=0.2),
        entropy=1.0 + torch.rand(*shape, generator=generator, dtype=torch.float64),
        advantages=advantages.clone(),
        mask=mask,
    )


def packed(
    batch: Batch, *, rows: list[int] | None = None, padding: int = 3, given: bool = True
) -> LossInputs:
    """The sequences one after another, then padding; NaN wherever the mask is not.

    Args:
        rows: which sequences, in which order.
        given: with logprobs of the reference policy and of the one before the first step.
    """
    rows = list(range(len(batch.mask))) if rows is None else rows
    lengths = batch.lengths

    def joined(values: Tensor, fill: float) -> Tensor:
        parts = [torch.where(batch.mask[row], values[row], math.nan)[: lengths[row]] for row in rows]
        return torch.cat([*parts, values.new_full((padding,), fill)])

    mask = torch.cat([*(batch.mask[row][: lengths[row]] for row in rows), torch.zeros(padding).bool()])
    ids = [i for i, row in enumerate(rows) for _ in range(lengths[row])] + [len(rows)] * padding
    return LossInputs(
        logprobs=joined(batch.logprobs, math.nan).requires_grad_(),
        generator_logprobs=joined(batch.generator, math.nan),
        advantages=joined(batch.advantages, math.nan),
        mask=mask,
        sequence_ids=torch.tensor(ids),
        num_sequences=len(rows),
        reference_logprobs=joined(batch.reference, math.nan) if given else None,
        proximal_logprobs=joined(batch.proximal, math.nan) if given else None,
        entropy=joined(batch.entropy, math.nan).requires_grad_(),
    )


def replaced(inputs: LossInputs, **values: Tensor | int | None) -> LossInputs:
    return replace(inputs, **values)  # type: ignore[arg-type]


def value_and_gradients(loss: Loss, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, not divided, and its gradients for logprobs and entropy, [T]; 0 for what has no part in it."""
    output = loss(inputs)
    assert inputs.entropy is not None
    of_logprobs, of_entropy = torch.autograd.grad(
        output.loss_sum, (inputs.logprobs, inputs.entropy), allow_unused=True
    )
    zeros = torch.zeros_like(inputs.logprobs)
    return (
        output.loss_sum.detach(),
        zeros if of_logprobs is None else of_logprobs,
        zeros if of_entropy is None else of_entropy,
    )


def by_name(settings: object) -> dict[str, object]:
    return {f.name: getattr(settings, f.name) for f in fields(settings)}  # type: ignore[arg-type]
