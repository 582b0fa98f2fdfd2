"""What one `forward_backward` measures, and what a whole step has accumulated.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from losses.ops import drawn_tokens
from losses.types import LossInputs, LossOutput
from rl.distributed.reductions import reduce_sums_and_maxima
from rl.rollouts.packing import PackedBatch
from rl.training.errors import NonFiniteLossError
from rl.training.failures import non_finite
from rl.types import ExpertLoad, ForwardBackwardResult, Packing, TrainingSample

_SUMS = (
    "loss", "denominator", "num_valid", "num_masked", "entropy", "num_drawn", "logprob_diff", "num_different",
    "num_padding", "num_rows", "num_attended",
)  # fmt: skip
"""What each micro-batch adds up, in this order; the loss's own metrics follow."""


@dataclass(kw_only=True, slots=True)
class StepState:
    """What the gradients now hold: everything since the last `optim_step`."""

    num_calls: int = 0
    """Of `forward_backward`."""
    denominator: float | None = None
    """Global sum so far; None while nothing is accumulated, or if the loss asks for no division."""
    samples: list[TrainingSample] = field(default_factory=list)
    """Kept by reference, to be written out if the step turns out not to be finite."""

    def clear(self) -> None:
        """Nothing is accumulated any more."""
        self.num_calls, self.denominator, self.samples = 0, None, []

    def check_denominator(self, denominator: Tensor | None) -> None:
        """Raise ValueError if a loss asks for a division and an earlier one of this step does not."""
        if self.num_calls and (denominator is None) != (self.denominator is None):
            asked, earlier = ("none", "one") if denominator is None else ("one", "none")
            raise ValueError(
                f"this loss asks for {asked} denominator, but an earlier forward_backward of the same step "
                f"for {earlier}: call optim_step between them"
            )

    def add(self, *, samples: Sequence[TrainingSample], denominator: float | None) -> None:
        self.num_calls += 1
        self.samples.extend(samples)
        if denominator is not None:
            self.denominator = (self.denominator or 0.0) + denominator

    def scale(self, *, allow_empty: bool = False) -> float:
        """What the summed gradient is multiplied by.

        Raises:
            ValueError: if nothing was accumulated, or no token was valid; unless that is allowed, for the
                gradient is zero then.
        """
        if allow_empty and not self.denominator:
            return 1.0
        if not self.num_calls:
            raise ValueError("optim_step without an accumulated gradient: call forward_backward first")
        if self.denominator is None:
            return 1.0
        if not self.denominator > 0.0:
            raise ValueError(
                f"the denominator of this step is {self.denominator:g}: no sample had a valid token"
            )
        return 1.0 / self.denominator

    def not_finite(self, what: str, policy_version: int, folder: str | None) -> NonFiniteLossError:
        """The error to raise on every rank; `folder` receives the samples."""
        return non_finite(what, policy_version=policy_version, samples=self.samples, folder=folder)


def loss_inputs(batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor | None) -> LossInputs:
    """What a loss takes, of a batch and what the policy says of it; the entropy where it asks for that.

    K targets of a token are K entries one after another, so that [T, K] becomes [T K].
    """
    return LossInputs(
        logprobs=logprobs_T.flatten(),
        generator_logprobs=batch.generator_logprobs.flatten(),
        advantages=batch.advantages.flatten(),
        mask=batch.mask.flatten(),
        sequence_ids=of_targets(batch.sequence_ids, batch),
        num_sequences=batch.num_sequences,
        reference_logprobs=_flat(batch.reference_logprobs),
        proximal_logprobs=_flat(batch.proximal_logprobs),
        ratio_mask=batch.ratio_mask,
        entropy=None if entropy_T is None else of_targets(entropy_T, batch),
    )


def of_targets(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """What is known of each token, for each of its targets: [T] or [T K]."""
    if batch.targets.ndim == 1:
        return values_T
    return values_T.repeat_interleave(batch.targets.size(1))


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.flatten()


class MicroBatchSums:
    """Sums over the micro-batches of one call, kept on the device until the end of it."""

    def __init__(self, *, device: torch.device, room: int) -> None:
        """`room`: tokens that one micro-batch of every rank can hold together."""
        self._device = device
        self._room = room
        self._rows: list[Tensor] = []
        self._largest: list[Tensor] = []
        self._metrics: tuple[str, ...] = ()
        self.normalized = False
        """Whether the loss asks for a denominator."""

    @torch.no_grad()
    def add(self, batch: PackedBatch, inputs: LossInputs, output: LossOutput, entropy_T: Tensor) -> None:
        """One micro-batch; its loss may be attached to a graph."""
        entropy_T = of_targets(entropy_T, batch)
        logprobs_T = inputs.logprobs.detach()
        drawn_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        diff_T = torch.where(drawn_T, (logprobs_T - inputs.generator_logprobs).abs(), 0.0)
        is_padding_T = batch.sequence_ids == batch.num_sequences
        denominator = output.denominator
        self.normalized = denominator is not None
        self._metrics = tuple(output.metric_sums)
        row = (
            output.loss_sum.detach(),
            torch.zeros((), device=self._device) if denominator is None else denominator,
            output.num_tokens,
            inputs.mask.sum(),
            torch.where(inputs.mask, entropy_T, 0.0).sum(),
            drawn_T.sum(),
            diff_T.sum(),
            (drawn_T & (logprobs_T != inputs.generator_logprobs)).sum(),
            is_padding_T.sum(),
            torch.full((), batch.sequence_ids.numel(), device=self._device),
            torch.where(is_padding_T, 0, batch.positions + 1).sum(),
            *output.metric_sums.values(),
        )
        self._rows.append(torch.stack([value.detach().double() for value in row]))
        self._largest.append(diff_T.amax().double())

    def reduce(self, *, mesh: DeviceMesh | None) -> Totals:
        """Over micro-batches and ranks: the one wait for the device in a call."""
        sums, (largest,) = reduce_sums_and_maxima(
            torch.stack(self._rows).sum(0), torch.stack(self._largest).amax().reshape(1), mesh=mesh
        )
        return Totals(
            sums=dict(zip(_SUMS, sums, strict=False)),
            metric_sums=dict(zip(self._metrics, sums[len(_SUMS) :], strict=True)),
            logprob_diff_max=largest,
            num_micro_batches=len(self._rows),
            num_room=len(self._rows) * self._room,
            normalized=self.normalized,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Of one call, over all ranks."""

    sums: Mapping[str, float]
    metric_sums: Mapping[str, float]
    logprob_diff_max: float
    num_micro_batches: int
    num_room: int
    normalized: bool

    @property
    def loss(self) -> float:
        return self.sums["loss"]

    @property
    def denominator(self) -> float | None:
        return self.sums["denominator"] if self.normalized else None

    def result(
        self,
        samples: Sequence[TrainingSample],
        *,
        time_s: float,
        expert_load: ExpertLoad | None = None,
        logprobs: tuple[np.ndarray, ...] | None = None,
    ) -> ForwardBackwardResult:
        """As it is reported; a mean over no token is 0, a ratio 1, and nothing identical."""
        sums = self.sums
        num_valid = sums["num_valid"]
        means = {name: _mean(value, num_valid) for name, value in self.metric_sums.items()}
        advantages_T = np.concatenate([s.advantages[1:][s.mask[1:]] for s in samples]).astype(np.float64)
        return ForwardBackwardResult(
            loss_sum=sums["loss"],
            denominator=sums["denominator"],
            num_samples=len(samples),
            num_tokens=sum(len(s.token_ids) - 1 for s in samples),
            num_valid_tokens=round(num_valid),
            advantage_mean=float(advantages_T.mean()) if advantages_T.size else 0.0,
            advantage_std=float(advantages_T.std()) if advantages_T.size else 0.0,
            ratio_mean=means.get("ratio", 1.0) if num_valid else 1.0,
            clipped_fraction=means.get("clipped_fraction", 0.0),
            entropy_mean=_mean(sums["entropy"], sums["num_masked"]),
            logprob_diff_mean=_mean(sums["logprob_diff"], sums["num_drawn"]),
            logprob_diff_max=self.logprob_diff_max,
            logprobs_identical=sums["num_drawn"] > 0 and sums["num_different"] == 0,
            loss_metrics=means,
            expert_load=expert_load,
            packing=Packing(
                num_micro_batches=self.num_micro_batches,
                num_packed=round(sums["num_rows"] - sums["num_padding"]),
                num_padding=round(sums["num_padding"]),
                num_room=self.num_room,
                num_attended=round(sums["num_attended"]),
            ),
            logprobs=logprobs,
            time_s=time_s,
        )


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
