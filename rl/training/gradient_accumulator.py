"""Samples through the policy and a loss, micro-batch by micro-batch, and the gradient that adds up.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from losses.types import Loss, LossInputs, LossOutput, uses_entropy
from rl.distributed.process_group import awaiting
from rl.rollouts.packing import PackedBatch
from rl.training.accumulate import MicroBatchSums, StepState, loss_inputs
from rl.training.experts import ExpertBalance
from rl.training.failures import non_finite
from rl.training.gradients import (
    clip_factor,
    global_norm,
    scale_gradients,
    sum_partial_gradients,
    zero_gradients,
)
from rl.training.policy import Policy, token_values_of
from rl.training.reference import ReferencePolicy, with_reference
from rl.training.token_values import TokenValues
from rl.types import ForwardBackwardResult, TrainingSample


class GradientAccumulator:
    """What is accumulated between two optimizer steps: the parameters' gradients, and what they are of.

    Every rank makes the same calls with the same samples. What fails on its way leaves nothing accumulated,
    of earlier calls neither; what is refused before it starts leaves all as it was.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        reference: ReferencePolicy | None,
        experts: ExpertBalance,
        failure_folder: str | None,
    ) -> None:
        """`failure_folder` receives samples on which a loss was not finite."""
        self._policy = policy
        self._reference = reference
        self._experts = experts
        self._failure_folder = failure_folder
        self.state = StepState()

    def add(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss,
        version: int,
        return_logprobs: bool | Sequence[int],
    ) -> ForwardBackwardResult:
        """As `TrainingEngine.forward_backward`, at policy version `version`."""
        started = time.perf_counter()
        if not samples:
            raise ValueError("forward_backward got no samples")
        places = _places(return_logprobs, num_samples=len(samples))
        batches = self._policy.pack(samples)
        sums = MicroBatchSums(device=self._policy.device, room=self._policy.micro_batch_room)
        values = token_values_of(self._policy, samples, places) if places else None
        with self.dropped_on_error(f"forward_backward of step {version}"):
            for batch in with_reference(batches, reference=self._reference, loss=loss):
                self._backward(batch.to(self._policy.device), loss=loss, sums=sums, values=values)
            totals = sums.reduce(mesh=self._policy.mesh)
            expert_load = self._experts.reduce()
            logprobs = None if values is None else tuple(values.collect())
            # Nobody would look at them without a folder, and between two steps any number may come.
            kept = () if self._failure_folder is None else samples
            self.state.add(samples=kept, denominator=totals.denominator)
            if not math.isfinite(totals.loss):
                raise self.state.not_finite(f"loss {totals.loss}", version, self._failure_folder)
        return totals.result(
            samples,
            time_s=time.perf_counter() - started,
            expert_load=expert_load,
            logprobs=logprobs,
        )

    def _backward(
        self, batch: PackedBatch, *, loss: Loss, sums: MicroBatchSums, values: TokenValues | None
    ) -> None:
        """Add the gradient of the batch's loss, and its numbers to `sums` and `values`."""
        policy = self._policy
        logprobs_T, entropy_T = policy.forward(batch, entropy_gradient=uses_entropy(loss))
        self._experts.count(policy.real_tokens(batch))
        inputs, output = _evaluate(batch, logprobs_T, entropy_T, loss=loss)
        self.state.check_denominator(output.denominator)
        # A micro-batch of padding alone goes backward too: FSDP's ranks reduce together.
        loss_sum = output.loss_sum if batch.num_sequences else 0.0 * logprobs_T.sum()
        loss_sum.backward()
        sums.add(batch, inputs, output, entropy_T)
        if values is not None:
            values.add(batch, logprobs_T)

    @torch.no_grad()
    def evaluate(
        self, samples: Sequence[TrainingSample], *, loss: Loss, version: int
    ) -> ForwardBackwardResult:
        """As `TrainingEngine.forward`: nothing is added, and no expert counted."""
        started = time.perf_counter()
        if not samples:
            raise ValueError("forward got no samples")
        policy = self._policy
        batches = policy.pack(samples)
        sums = MicroBatchSums(device=policy.device, room=policy.micro_batch_room)
        values = token_values_of(policy, samples)
        with awaiting(f"forward of step {version}", record_in=self._failure_folder):
            try:
                for batch in with_reference(batches, reference=self._reference, loss=loss):
                    batch = batch.to(policy.device)
                    logprobs_T, entropy_T = policy.forward(batch)
                    sums.add(batch, *_evaluate(batch, logprobs_T, entropy_T, loss=loss), entropy_T)
                    values.add(batch, logprobs_T)
            finally:
                policy.release()
            totals = sums.reduce(mesh=policy.mesh)
            logprobs = tuple(values.collect())
        if not math.isfinite(totals.loss):
            raise non_finite(
                f"loss {totals.loss}", policy_version=version, samples=samples, folder=self._failure_folder
            )
        return totals.result(samples, time_s=time.perf_counter() - started, logprobs=logprobs)

    def finish(self, *, scale: float, max_norm: float, version: int) -> float:
        """Sum over ranks, multiply by `scale`, clip; returns the norm before that. Of nothing it is zero.

        Raises:
            NonFiniteLossError: the norm is NaN or infinite.
        """
        parameters = list(self._policy.trained_parameters.values())
        if not self.state.num_calls:
            zero_gradients(parameters)
        sum_partial_gradients(parameters)
        norm = global_norm(parameters, mesh=self._policy.mesh) * scale
        if not math.isfinite(norm):
            raise self.state.not_finite(f"gradient norm {norm}", version, self._failure_folder)
        scale_gradients(parameters, scale * clip_factor(norm, max_norm=max_norm))
        return norm

    def drop(self) -> None:
        """Forget it all."""
        for parameter in self._policy.parameters.values():
            parameter.grad = None
        self.state.clear()
        self._experts.forget()

    @contextmanager
    def dropped_on_error(self, what: str) -> Iterator[None]:
        """Within it a collective that fails is said to be of `what`."""
        done = False
        try:
            with awaiting(what, record_in=self._failure_folder):
                yield
            done = True
        finally:
            if not done:
                self._policy.release()
                self.drop()


def _places(asked: bool | Sequence[int], *, num_samples: int) -> Sequence[int]:
    """Of the samples whose logprobs are asked for: True is all of them, False none.

    Raises:
        ValueError: a place that there is not, or one that comes twice.
    """
    if isinstance(asked, bool):
        return range(num_samples if asked else 0)
    places = list(asked)
    outside = next((place for place in places if not 0 <= place < num_samples), None)
    if outside is not None:
        raise ValueError(f"return_logprobs has {outside}: must be places of samples, 0 to {num_samples - 1}")
    if len(set(places)) < len(places):
        raise ValueError(f"return_logprobs={places}: a sample comes twice")
    return places


def _evaluate(
    batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor, *, loss: Loss
) -> tuple[LossInputs, LossOutput]:
    inputs = loss_inputs(batch, logprobs_T, entropy_T if uses_entropy(loss) else None)
    return inputs, loss(inputs)
