"""Sums and values of one call of the engine, over its micro-batches and all ranks.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from losses.ops import drawn_tokens
from losses.types import Loss, LossInputs, LossOutput, get_sequence_setting
from rl.distributed.collectives import reduce_sums_and_maxima
from rl.rollouts.bundles import count_episodes
from rl.rollouts.packing import PackedBatch
from rl.trainer_types import DeviceMemory, ForwardBackwardResult, Packing, TrainedTokens
from rl.training.device_memory import read_peak_memory
from rl.training.policy import Policy
from rl.training.token_values import TokenValues
from rl.types import TrainingSample
from rl.utils.tensor_memory import to_device

METRIC = "metric "
"""Prefix of the names of a loss's own metrics among other sums."""


class CallSums:
    """Micro-batches of one call, and their sums, which stay on the device until its end."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        policy: Policy,
        loss: Loss,
        wanted: Sequence[int],
        trained: Sequence[int] = (),
    ) -> None:
        """Pack the samples.

        Args:
            wanted: indices of the samples whose logprobs are returned.
            trained: indices of the samples of which is returned what the loss has read.
        """
        if not samples:
            raise ValueError("forward and forward_backward need samples: there are no samples")
        self.batches = policy.pack(samples, undivided_for=get_sequence_setting(loss))
        self.has_denominator = False
        self._samples = samples
        self._policy = policy
        # Values stay on the device until the call's end: a copy would make the next one wait.
        make_values = partial(
            TokenValues,
            samples,
            data_rank=policy.data_rank,
            mesh=policy.mesh,
            device=policy.device,
        )
        self._values = make_values(wanted=wanted) if wanted else None
        self._trained = make_values(wanted=trained, num_values=2) if trained else None
        """Logprob and advantage of each token."""
        self._sums: list[dict[str, Tensor]] = []
        """Sums of each micro-batch by name, [] float64; a loss's metrics begin with METRIC."""
        self._largest: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """True if the sums of all micro-batches are there."""
        return len(self._sums) == len(self.batches)

    def has_wanted(self, batch: PackedBatch) -> bool:
        """Return whether a sample of the micro-batch is wanted."""
        return self._values is not None and self._values.has_wanted(batch)

    @torch.no_grad()
    def add(
        self,
        batch: PackedBatch,
        inputs: LossInputs,
        output: LossOutput,
        logprobs_T: Tensor,
        entropy_T: Tensor,
    ) -> None:
        """Add the sums and logprobs of one micro-batch."""
        if self._values is not None:
            self._values.add(batch, logprobs_T)
        if self._trained is not None and self._trained.has_wanted(batch):
            # Not from the samples: what the loss was given is what was trained on.
            read_T2 = torch.stack((logprobs_T.detach().float(), batch.advantages), dim=-1)
            self._trained.add(batch, read_T2.where(batch.mask.unsqueeze(-1), torch.nan))

        entropy_T = _repeat_by_target(entropy_T, batch)
        logprobs_T = inputs.logprobs.detach()
        # Only tokens that the generator drew have a logprob to compare with.
        drawn_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        diff_T = torch.where(drawn_T, (logprobs_T - inputs.generator_logprobs).abs(), 0.0)
        is_padding_T = batch.sequence_ids == batch.num_sequences
        denominator = output.denominator
        self.has_denominator = denominator is not None
        sums = {
            "loss": output.loss_sum,
            "denominator": torch.zeros_like(output.loss_sum)
            if denominator is None
            else denominator,
            "num_valid": output.num_tokens,
            "num_masked": inputs.mask.sum(),
            "advantages": inputs.advantages.double().where(inputs.mask, 0.0).sum(),
            "entropy": torch.where(inputs.mask, entropy_T, 0.0).sum(),
            "num_drawn": drawn_T.sum(),
            "logprob_diff": diff_T.sum(),
            "num_different": (drawn_T & (logprobs_T != inputs.generator_logprobs)).sum(),
            "num_padding": is_padding_T.sum(),
            "num_rows": torch.full_like(output.num_tokens, batch.sequence_ids.numel()),
            "num_attended": torch.where(is_padding_T, 0, batch.positions + 1).sum(),
        }
        for name, value in output.metric_sums.items():
            sums[f"{METRIC}{name}"] = value
        # In float64, so that sums over many micro-batches and ranks do not round.
        self._sums.append({name: value.detach().double() for name, value in sums.items()})
        self._largest.append(diff_T.amax().double())

    def reduce(self) -> ForwardBackwardResult:
        """Sum over micro-batches and ranks, which waits for the device.

        A mean over no token is 0, a ratio 1.
        """
        policy, samples = self._policy, self._samples
        names = list(self._sums[0]) if self._sums else []
        if policy.pipeline is not None:  # Only the last stage knows the sums.
            names, self.has_denominator = policy.pipeline.broadcast_from_last(
                (names, self.has_denominator)
            )

        # One collective for all numbers of a call: sums, maxima, and the memory of the ranks.
        zeros = torch.zeros(len(names), dtype=torch.float64, device=policy.device)
        rows = [torch.stack(list(sums.values())) for sums in self._sums]
        sums_N = torch.stack(rows).sum(0) if rows else zeros
        largest = torch.stack([*self._largest, zeros.new_zeros(())]).amax().reshape(1)
        own_memory = torch.tensor(read_peak_memory(policy.device), dtype=torch.float64)
        largest = torch.cat((largest, to_device(own_memory, policy.device)))
        totals, (logprob_diff_max, *memory) = reduce_sums_and_maxima(
            sums_N, largest, mesh=policy.mesh
        )

        sums = dict(zip(names, totals, strict=True))
        num_valid = sums["num_valid"]
        means: dict[str, float] = {}
        for name, value in sums.items():
            if name.startswith(METRIC):
                means[name.removeprefix(METRIC)] = _divide(value, num_valid)
        return ForwardBackwardResult(
            loss_sum=sums["loss"],
            denominator=sums["denominator"],
            num_samples=count_episodes(samples),
            num_tokens=sum(len(s.token_ids) - 1 for s in samples),
            num_valid_tokens=round(num_valid),
            num_trained_tokens=round(sums["num_masked"]),
            advantage_sum=sums["advantages"],
            ratio_mean=means.get("ratio", 1.0) if num_valid else 1.0,
            clipped_fraction=means.get("clipped_fraction", 0.0),
            entropy_mean=_divide(sums["entropy"], sums["num_masked"]),
            logprob_diff_mean=_divide(sums["logprob_diff"], sums["num_drawn"]),
            logprob_diff_max=logprob_diff_max,
            logprobs_identical=sums["num_drawn"] > 0 and sums["num_different"] == 0,
            loss_metrics=means,
            packing=Packing(
                num_micro_batches=len(self.batches),
                num_packed=round(sums["num_rows"] - sums["num_padding"]),
                num_padding=round(sums["num_padding"]),
                num_room=len(self.batches)
                * policy.training.max_tokens_per_microbatch
                * policy.data_rank.count,
                num_attended=round(sums["num_attended"]),
            ),
            memory=None if not memory else DeviceMemory.of_numbers(memory),
            logprobs=None if self._values is None else tuple(self._values.collect()),
            trained=None if self._trained is None else _split_trained(self._trained),
        )


def _split_trained(values: TokenValues) -> tuple[TrainedTokens, ...]:
    trained = []
    for read_T2 in values.collect():
        read_T2[0] = np.nan  # The first token is never a target.
        trained.append(TrainedTokens(logprobs=read_T2[..., 0], advantages=read_T2[..., 1]))
    return tuple(trained)


def make_loss_inputs(
    batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor | None
) -> LossInputs:
    """Return the loss's inputs; [T, K] becomes [T K], so that a loss sees one entry a target."""
    return LossInputs(
        logprobs=logprobs_T.flatten(),
        generator_logprobs=batch.generator_logprobs.flatten(),
        advantages=batch.advantages.flatten(),
        mask=batch.mask.flatten(),
        sequence_ids=_repeat_by_target(batch.sequence_ids, batch),
        num_sequences=batch.num_sequences,
        reference_logprobs=_flatten(batch.reference_logprobs),
        proximal_logprobs=_flatten(batch.proximal_logprobs),
        ratio_mask=batch.ratio_mask,
        entropy=None if entropy_T is None else _repeat_by_target(entropy_T, batch),
    )


def _repeat_by_target(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """Repeat each token's value for each of its targets, [T] to [T K]."""
    if batch.targets.ndim == 1:
        return values_T
    return values_T.repeat_interleave(batch.targets.size(1))


def _flatten(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.flatten()


def _divide(total: float, count: float) -> float:
    return total / count if count else 0.0
