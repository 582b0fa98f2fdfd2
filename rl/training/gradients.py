"""Accumulation of gradients over micro-batches and calls, and the step's norm, scale and clip.

Gradients are sums over micro-batches, calls and ranks; `optim_step` divides once by the summed
denominator. So k calls on parts of a batch equal one call on the whole.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from losses.types import Loss, LossOutput, uses_entropy
from rl.distributed.collectives import sum_over_world
from rl.distributed.mesh import count_ranks_of_stage
from rl.distributed.process_group import await_ranks
from rl.distributed.sharding import count_shards, local_tensor
from rl.rollouts.packing import PackedBatch
from rl.trainer_types import ForwardBackwardResult
from rl.training.call_sums import CallSums, make_loss_inputs
from rl.training.compat import compute_norms, scale_in_place
from rl.training.failures import make_non_finite_error
from rl.training.policy import Policy
from rl.training.reference import ReferencePolicy
from rl.training.token_values import select_samples
from rl.types import TrainingSample
from rl.utils.tensor_memory import to_device

STEPPED = (
    "forward_backward has stepped weights already, with optimizer.early_step_in_backward=True: "
    "call optim_step after each call, or load_checkpoint if a call failed"
)


class GradientAccumulator:
    """The gradient between two optimizer steps.

    Every rank makes the same calls with the same samples. A call that fails after it has started
    drops the whole gradient; a call that is refused changes nothing.

    Example:
        gradient.add(first_half, loss=loss, version=7)
        gradient.add(other_half, loss=loss, version=7)
        scale = gradient.scale()  # 1 / (sum of both denominators): as if it were one call
        norm = gradient.finish(scale=scale, max_norm=1.0, version=7)
    """

    def __init__(
        self,
        *,
        policy: Policy,
        reference: ReferencePolicy | None,
        experts: Any,
        failure_folder: str | None,
    ) -> None:
        """`failure_folder` receives the samples of a loss that is not finite."""
        self._policy = policy
        self._reference = reference
        self._experts = experts
        """`rl.training.experts.ExpertBalance`, or None for a dense model."""
        self._failure_folder = failure_folder
        self.num_calls = 0
        """Calls since the last `optim_step`."""
        self.denominator: float | None = None
        """Sum over calls and ranks; None without a call, or if the loss asks for no division."""
        self._samples: list[TrainingSample] = []
        """Samples to write if the step is not finite; empty without a failure folder."""
        self._steps_early = False
        self.has_stepped = False
        """True after parameters were stepped early: the weights are between two versions."""
        self._norms: dict[nn.Parameter, Tensor] = {}
        """Norms of this rank's shards of the gradients that are freed."""

    def step_early_with(self, step: Callable[[nn.Parameter], None]) -> None:
        """Call `step` with each parameter in the backward of a call's last micro-batch.

        A parameter's gradient is complete there, and freed after the step.
        """
        self._steps_early = True
        hook = partial(self._step_early, step)
        for parameter in self._policy.trained_parameters.values():
            parameter.register_post_accumulate_grad_hook(hook)

    def _step_early(self, step: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> None:
        # Set as soon as the last micro-batch's loss is known, before its backward.
        if not self.has_stepped:
            return
        place_gradients([parameter])
        # The step's norm is reported although it comes too late to clip.
        self._norms |= compute_local_norms([parameter])
        step(parameter)
        parameter.grad = None

    def add(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss,
        version: int,
        return_logprobs: bool | Sequence[int] = False,
        return_trained: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the loss over `samples` (`TrainingEngine.forward_backward`)."""
        if self.has_stepped:
            raise ValueError(STEPPED)
        # What the caller may have done wrong is raised before anything is added.
        num = len(samples)
        call = CallSums(
            samples,
            policy=self._policy,
            loss=loss,
            wanted=select_samples(return_logprobs, num_samples=num, name="return_logprobs"),
            trained=select_samples(return_trained, num_samples=num, name="return_trained"),
        )
        with self.drop_on_error(f"forward_backward of step {version}"):
            self._run(call, loss=loss, backward=True)
            result = call.reduce()
            if self._experts is not None:
                result = replace(result, expert_load=self._experts.reduce())

            self.num_calls += 1
            if self._failure_folder is not None:
                self._samples.extend(samples)
            if call.has_denominator:
                self.denominator = (self.denominator or 0.0) + result.denominator
            self._check_finite(f"loss {result.loss_sum}", result.loss_sum, version, self._samples)
        return result

    @torch.no_grad()
    def evaluate(
        self, samples: Sequence[TrainingSample], *, loss: Loss, version: int
    ) -> ForwardBackwardResult:
        """Return what `add` would, with logprobs, without a gradient (`TrainingEngine.forward`)."""
        call = CallSums(samples, policy=self._policy, loss=loss, wanted=range(len(samples)))
        with await_ranks(f"forward of step {version}", record_in=self._failure_folder):
            # Without a backward FSDP keeps parameters gathered, also after an error.
            try:
                self._run(call, loss=loss, backward=False)
            finally:
                self._policy.release()
            result = call.reduce()
        self._check_finite(f"loss {result.loss_sum}", result.loss_sum, version, samples)
        return result

    def scale(self, *, allow_empty: bool = False) -> float:
        """Return the factor of the summed gradient.

        Raises ValueError as `TrainingEngine.optim_step`.
        """
        if self.has_stepped and not self.num_calls:
            raise ValueError(STEPPED)
        if allow_empty and not self.denominator:
            return 1.0
        if not self.num_calls:
            raise ValueError(
                "optim_step without an accumulated gradient: call forward_backward first"
            )
        if self.denominator is None:
            return 1.0
        if not self.denominator > 0.0:
            raise ValueError(
                f"the denominator of this step is {self.denominator:g}: no sample had a valid token"
            )
        return 1.0 / self.denominator

    def finish(self, *, scale: float, max_norm: float, version: int) -> float:
        """Multiply the gradient by `scale`, clip it, and return its norm before clipping.

        Raises NonFiniteLossError.
        """
        parameters, mesh = list(self._policy.trained_parameters.values()), self._policy.mesh
        if not self.num_calls:
            # An empty step: running means and weights decay as if by a gradient of zero.
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter.data)

        place_gradients(parameters)
        for parameter in parameters:
            assert _is_placed_like(parameter.grad, parameter.data), (
                "gradients lie as their parameters"
            )

        squares = compute_squared_norm(self._norms | compute_local_norms(parameters), mesh=mesh)
        norm = math.sqrt(sum_over_world(squares, mesh=mesh)) * scale
        # Before the step: one gradient that is not finite would destroy every weight.
        self._check_finite(f"gradient norm {norm}", norm, version, self._samples)

        # The division by the denominator and the clip are one pass over the gradient.
        factor = scale * min(1.0, max_norm / (norm + 1e-6))
        if factor != 1.0:
            scale_in_place(_list_local_gradients(parameters), factor)
        return norm

    def drop(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._policy.parameters.values():
            parameter.grad = None
        self.num_calls, self.denominator, self._samples, self._norms = 0, None, [], {}
        if self._experts is not None:
            self._experts.forget()

    @contextmanager
    def drop_on_error(self, what: str) -> Iterator[None]:
        """Drop the gradient if the block fails; a collective's error is that of `what`."""
        try:
            with await_ranks(what, record_in=self._failure_folder):
                yield
        except BaseException:
            # Some micro-batches may be in the gradient and others not.
            self._policy.release()
            self.drop()
            raise

    def _run(self, call: CallSums, *, loss: Loss, backward: bool) -> None:
        """Take the micro-batches of a call forward and, if asked, backward."""
        batches = call.batches
        if self._reference is not None and getattr(loss, "uses_reference", False):
            batches = self._reference.attach(batches)
        reads_entropy = uses_entropy(loss)

        def compute_loss(batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
            inputs = make_loss_inputs(batch, logprobs_T, entropy_T if reads_entropy else None)
            output = loss(inputs)
            call.add(batch, inputs, output, logprobs_T, entropy_T)
            if backward:
                self._check_denominator(output)
                # Before the backward, whose hooks step the parameters: the last micro-batch
                # completes their gradients.
                self.has_stepped = self._steps_early and call.is_complete
            # A micro-batch of padding goes backward too, because FSDP's ranks reduce together.
            return output.loss_sum if batch.num_sequences else 0.0 * logprobs_T.sum()

        self._policy.run(
            batches,
            compute_loss,
            backward=backward,
            entropy_gradient=backward and reads_entropy,
            only_loss_rows=lambda batch: not call.has_wanted(batch),
        )

    def _check_denominator(self, output: LossOutput) -> None:
        if self._steps_early and output.denominator is not None:
            raise ValueError(
                "optimizer.early_step_in_backward=True with a loss that has a denominator: give it "
                "normalization 'none', or set early_step_in_backward to False"
            )
        if self.num_calls and (output.denominator is None) != (self.denominator is None):
            raise ValueError(
                "this loss has a denominator and an earlier one of the same step has none, or the "
                "reverse: call optim_step between them"
            )

    def _check_finite(
        self, what: str, value: float, version: int, samples: Sequence[TrainingSample]
    ) -> None:
        if not math.isfinite(value):
            raise make_non_finite_error(
                what, policy_version=version, samples=samples, folder=self._failure_folder
            )


def place_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Lay out the gradients as their parameters, where backward has left them otherwise.

    On tensor-parallel ranks the gradient of a replicated parameter, as of a norm, is a partial sum:
    its rank has seen only its own tokens or heads. That of a row-sharded embedding is whole on
    every rank. A norm or a step that took such a gradient for its parameter's shard would count it
    several times, or be wrong.
    """
    for parameter in parameters:
        grad, data = parameter.grad, parameter.data
        if (
            isinstance(grad, DTensor)
            and isinstance(data, DTensor)
            and grad.placements != data.placements
        ):
            parameter.grad = grad.redistribute(placements=data.placements)


def _is_placed_like(gradient: Tensor | None, parameter: Tensor) -> bool:
    """Return whether a gradient that is there has the layout of its parameter."""
    if gradient is None:
        return True
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return type(gradient) is type(parameter)
    same_axes = gradient.device_mesh == parameter.device_mesh
    return same_axes and gradient.placements == parameter.placements


def compute_local_norms(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the 2-norm, [], of this rank's shard of each gradient that is there."""
    with_grad = [p for p in parameters if p.grad is not None]
    return dict(zip(with_grad, compute_norms(_list_local_gradients(parameters)), strict=True))


def compute_squared_norm(
    norms: Mapping[nn.Parameter, Tensor], *, mesh: DeviceMesh | None
) -> Tensor:
    """Return this rank's part of the square of the gradients' 2-norm, [] float64.

    The sum over the world is the whole square. Each rank adds the squares of its shards' norms,
    divided by the number of ranks that hold the same shard, which are of one stage.
    """
    squares = torch.stack(list(norms.values())).double().square()
    shares = [count_shards(p) / count_ranks_of_stage(mesh) for p in norms]
    return (squares * to_device(torch.tensor(shares, dtype=torch.float64), squares.device)).sum()


def _list_local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]
