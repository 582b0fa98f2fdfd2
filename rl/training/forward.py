"""One packed micro-batch through the model.

Shape legend: T packed tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from losses.types import LossInputs
from rl.distributed.sharding import call_in_dtype
from rl.models.logprobs import token_logprobs
from rl.rollouts.packing import PackedBatch


def logprobs_and_entropy(
    model: nn.Module, batch: PackedBatch, *, param_dtype: torch.dtype, chunk_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Of each target, [T] float32 nats with gradient, and of its distribution, [T] float32 nats."""
    head = partial(
        token_logprobs,
        targets_T=batch.targets,
        temperatures_T=batch.temperatures,
        chunk_tokens=chunk_tokens,
    )
    return call_in_dtype(
        model,
        param_dtype,
        batch.input_ids,
        positions=batch.positions,
        sequences=batch.sequences,
        head=head,
    )


def loss_inputs(batch: PackedBatch, logprobs_T: Tensor) -> LossInputs:
    return LossInputs(
        logprobs=logprobs_T,
        generator_logprobs=batch.generator_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
    )
