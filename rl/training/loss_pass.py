"""Samples through the policy and a loss, micro-batch by micro-batch: with a gradient, or without.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from losses.types import Loss, LossInputs, LossOutput, uses_entropy
from rl.rollouts.packing import PackedBatch
from rl.training.accumulate import MicroBatchSums, StepState, Totals, loss_inputs
from rl.training.experts import ExpertBalance
from rl.training.policy import Policy
from rl.training.reference import ReferencePolicy, with_reference
from rl.training.token_values import TokenValues
from rl.types import ExpertLoad, ForwardBackwardResult, TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """Of one pass, over all ranks."""

    totals: Totals
    expert_load: ExpertLoad | None
    logprobs: tuple[np.ndarray, ...] | None

    def result(self, samples: Sequence[TrainingSample], *, time_s: float) -> ForwardBackwardResult:
        """As it is reported."""
        return self.totals.result(
            samples, time_s=time_s, expert_load=self.expert_load, logprobs=self.logprobs
        )


class LossPass:
    """Every rank makes the same calls with the same samples."""

    def __init__(self, *, policy: Policy, reference: ReferencePolicy | None, experts: ExpertBalance) -> None:
        self._policy = policy
        self._reference = reference
        self._experts = experts

    def backward(
        self,
        samples: Sequence[TrainingSample],
        batches: list[PackedBatch],
        *,
        loss: Loss,
        step: StepState,
        return_logprobs: bool,
    ) -> Measured:
        """Add the gradient of the summed loss to what the step has.

        Raises:
            ValueError: the loss asks for a denominator where an earlier one of the step did not.
        """
        policy = self._policy
        sums = MicroBatchSums(device=policy.device, room=policy.micro_batch_room)
        values = policy.token_values(samples) if return_logprobs else None
        for batch in with_reference(batches, reference=self._reference, loss=loss):
            batch = batch.to(policy.device)
            logprobs_T, entropy_T = policy.forward(batch, entropy_gradient=uses_entropy(loss))
            self._experts.count(policy.real_tokens(batch))
            inputs, output = _backward(batch, logprobs_T, entropy_T, loss=loss, step=step)
            sums.add(batch, inputs, output, entropy_T)
            if values is not None:
                values.add(batch, logprobs_T)
        return self._reduced(sums, values, expert_load=True)

    @torch.no_grad()
    def forward(
        self, samples: Sequence[TrainingSample], batches: list[PackedBatch], *, loss: Loss
    ) -> Measured:
        """The same numbers, with logprobs; there is no gradient, and no expert is counted."""
        policy = self._policy
        sums = MicroBatchSums(device=policy.device, room=policy.micro_batch_room)
        values = policy.token_values(samples)
        try:
            for batch in with_reference(batches, reference=self._reference, loss=loss):
                batch = batch.to(policy.device)
                logprobs_T, entropy_T = policy.forward(batch)
                inputs, output = _evaluate(batch, logprobs_T, entropy_T, loss=loss)
                sums.add(batch, inputs, output, entropy_T)
                values.add(batch, logprobs_T)
        finally:
            policy.release()
        return self._reduced(sums, values, expert_load=False)

    def _reduced(self, sums: MicroBatchSums, values: TokenValues | None, *, expert_load: bool) -> Measured:
        totals = sums.reduce(mesh=self._policy.mesh)
        return Measured(
            totals=totals,
            expert_load=self._experts.reduce() if expert_load else None,
            logprobs=None if values is None else tuple(values.collect()),
        )


def _evaluate(
    batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor, *, loss: Loss
) -> tuple[LossInputs, LossOutput]:
    inputs = loss_inputs(batch, logprobs_T, entropy_T if uses_entropy(loss) else None)
    return inputs, loss(inputs)


def _backward(
    batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor, *, loss: Loss, step: StepState
) -> tuple[LossInputs, LossOutput]:
    """Add the gradient of the batch's loss to what the step has."""
    inputs, output = _evaluate(batch, logprobs_T, entropy_T, loss=loss)
    step.check_denominator(output.denominator)
    # A micro-batch of padding alone goes backward too: FSDP's ranks reduce together.
    loss_sum = output.loss_sum if batch.num_sequences else 0.0 * logprobs_T.sum()
    loss_sum.backward()
    return inputs, output
