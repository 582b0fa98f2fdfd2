"""Random micro-batches in several forms: packed, padded by sequence, one by one.

Shape legend: T packed tokens, B sequences, L tokens of the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from losses.cross_entropy import CrossEntropyLoss
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
from losses.types import Loss, LossInputs, LossOutput

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
"""Losses whose bounds clip some but not all of the random ratios."""
LOSSES: dict[str, Loss] = POLICY_LOSSES | {
    "cross_entropy": CrossEntropyLoss(),
    "weighted cross_entropy": CrossEntropyLoss(weights="advantages"),
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences in padded form, [B, L] float64 each."""

    logprobs: Tensor
    generator: Tensor
    reference: Tensor
    proximal: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences, including masked tokens."""
        return [int(row.nonzero().max()) + 2 for row in self.mask]


def random_batch(
    seed: int, *, num_sequences: int = 5, length: int = 9, by_token: bool = False
) -> Batch:
    """Make sequences of different lengths with gaps in their masks, as tool results leave them.

    Args:
        by_token: give each token its own advantage instead of one per sequence.
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
    """Pack the sequences and padding, with NaN outside the mask.

    Args:
        rows: sequences to pack, in order.
        given: include reference and proximal logprobs.
    """
    rows = list(range(len(batch.mask))) if rows is None else rows
    lengths = batch.lengths

    def joined(values: Tensor, fill: float) -> Tensor:
        parts = [
            torch.where(batch.mask[row], values[row], math.nan)[: lengths[row]] for row in rows
        ]
        return torch.cat([*parts, values.new_full((padding,), fill)])

    mask = torch.cat(
        [*(batch.mask[row][: lengths[row]] for row in rows), torch.zeros(padding).bool()]
    )
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


def value_and_gradients(loss: Loss, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the undivided sum and its gradients with respect to logprobs and entropy, [T]."""
    output = loss(inputs)
    assert inputs.entropy is not None
    of_logprobs, of_entropy = torch.autograd.grad(
        output.loss_sum,
        (inputs.logprobs, inputs.entropy),
        allow_unused=True,
        materialize_grads=True,
    )
    return output.loss_sum.detach(), of_logprobs, of_entropy


def loss_and_gradient(loss: Loss, inputs: LossInputs) -> tuple[LossOutput, list[float]]:
    output = loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss_sum, inputs.logprobs)
    return output, gradient.tolist()
