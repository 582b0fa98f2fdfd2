"""The frozen starting weights that a KL term compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl.distributed.sharding import local_tensor
from rl.models.decoder import find_persistent_buffers
from rl.rollouts.packing import PackedBatch
from rl.training.config import TrainingConfig
from rl.training.policy import Policy


class ReferencePolicy:
    """The frozen starting weights, whose logprobs a KL term compares with.

    It has the policy's layout, and its parameters are stored in the dtype of the forward pass, so
    that its logprobs equal the policy's bit for bit before the first update.
    """

    def __init__(self, policy: Policy, *, build: Callable[[TrainingConfig], Policy]) -> None:
        """Copy `policy`; `build` makes a policy in the same layout."""
        self.policy = build(replace(policy.training, dtype=policy.training.param_dtype))
        for parameter in self.policy.parameters.values():
            parameter.requires_grad_(False)
        self.follow(policy)

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        """Copy the policy's weights, each rank its own shards."""
        for name, parameter in self.policy.parameters.items():
            local_tensor(parameter).copy_(local_tensor(policy.parameters[name]))
        buffers = find_persistent_buffers(policy.model)
        for name, buffer in find_persistent_buffers(self.policy.model).items():
            buffer.copy_(buffers[name])

    @torch.no_grad()
    def attach(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Return the batches with reference logprobs; those that samples brought stay."""
        if batches[0].reference_logprobs is not None:
            return [*batches]

        computed: list[Tensor] = []
        self.policy.run(batches, lambda _, logprobs_T, __: computed.append(logprobs_T))
        self.policy.release()
        # Only the last stage of a pipeline computes any, and only there a loss reads them.
        if not computed:
            return [*batches]
        pairs = zip(batches, computed, strict=True)
        return [replace(batch, reference_logprobs=logprobs_T) for batch, logprobs_T in pairs]
