"""Muon: gradient momentum that is orthogonalised matrix by matrix before it is applied.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon; scale of the update: Liu et al., "Muon is Scalable
for LLM Training" (arXiv:2502.16982), equation 4.

A matrix is one tensor of the Hugging Face checkpoint: each part of a fused projection (q, k, v;
gate, up) or of stacked experts is orthogonalised on its own, so that the result does not depend on
how weights are stored. Factors of adapters are taken as they are stacked. Orthogonalisation needs
the whole matrix, so shards of the momentum are gathered, parameters are dealt out to ranks, and
each rank broadcasts its results. The work is shared, and all ranks apply the same bits.

Shape legend: A, B rows and columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.config.tree import check_bounds
from rl.distributed.sharding import gather_whole, local_tensor, slice_local_shard, wrap_like
from rl.models.adapter import DecoderAdapter
from rl.training.rounding import Rounding, derive_bits, round_into, rows_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic whose iteration brings singular values to about 1 (first source)."""
EPS = 1e-7
NUM_ITERATIONS = 5
"""Iterations of the Newton-Schulz method, which brings singular values to about 1."""


@dataclass(kw_only=True, slots=True)
class MuonConfig:
    """Settings of the matrices that Muon steps; lr and weight decay are the optimizer's."""

    momentum: float = 0.95
    """Decay of the running mean of the gradient."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the iteration's matrix products."""

    def __post_init__(self) -> None:
        check_bounds(self, "momentum", at_least=0, below=1)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon steps a parameter: a matrix, or a stack of matrices, of a block.

    AdamW steps embedding, output head and norms, whose rows are not directions of one linear map.
    """
    return name.startswith("layers.") and parameter.ndim >= 2


class Muon:
    """Muon over a model's weight matrices, whole or sharded in any layout."""

    def __init__(
        self,
        *,
        config: MuonConfig,
        parameters: Mapping[str, nn.Parameter],
        adapter: DecoderAdapter | None,
        group: dist.ProcessGroup | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """
        Args:
            adapter: splits a parameter into its matrices; one that it does not know is one matrix.
            group: ranks with shards of these parameters; None: all.
            rounding: for parameters in bfloat16.
        """
        self.rounding = rounding or Rounding(seed=0)
        self.group = group
        self.config = config
        self.parameters = dict(parameters)
        self.adapter = adapter
        self.momenta: dict[nn.Parameter, Tensor] = {}

    def get_momentum(self, parameter: nn.Parameter) -> Tensor:
        """Return the running mean of a parameter, creating zeros if there is none."""
        if parameter not in self.momenta:
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self.momenta[parameter] = zeros.requires_grad_(False)
        return self.momenta[parameter]

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, momentum: float) -> None:
        """Update all parameters that have a gradient; collective."""
        rank, num_ranks = 0, 1
        if dist.is_initialized():
            rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        with_grad = [(name, p) for name, p in self.parameters.items() if p.grad is not None]
        # A window has one parameter for each rank, so that all ranks compute at the same time.
        for start in range(0, len(with_grad), num_ranks):
            window = with_grad[start : start + num_ranks]
            mine = None
            for owner, (name, parameter) in enumerate(window):
                whole = gather_whole(self._advance(name, parameter, momentum=momentum))
                mine = whole if owner == rank else mine
                del whole  # Free it before the next matrix is gathered.
            # Compute after all gathers of the window, so that no rank waits in the next gather.
            update = None if mine is None else self._orthogonalize_parts(window[rank][0], mine)

            for owner, (name, parameter) in enumerate(window):
                if owner == rank and update is not None:
                    whole = update
                else:
                    whole = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=_get_device(parameter)
                    )
                # One rank's bits for all: sums in another order would let replicas drift apart.
                if num_ranks > 1:
                    dist.broadcast(whole, group_src=owner, group=self.group)
                self._apply(
                    name,
                    parameter,
                    slice_local_shard(whole, parameter),
                    lr=lr,
                    weight_decay=weight_decay,
                )

    def _apply(
        self, name: str, parameter: nn.Parameter, update: Tensor, *, lr: float, weight_decay: float
    ) -> None:
        """Decay this rank's shard and move it by its part of the update."""
        if parameter.dtype != torch.bfloat16:
            local = local_tensor(parameter)
            local.mul_(1.0 - lr * weight_decay)
            local.add_(update.to(local), alpha=-lr)
            return

        weights = rows_of(parameter)
        update = update.to(weights).reshape(weights.shape)
        for rows, bits in self.rounding.split_rows(name, parameter):
            wide = weights[rows].float().mul_(1.0 - lr * weight_decay)
            wide.add_(update[rows].float(), alpha=-lr)
            self.rounding.store_weights(parameter, rows, wide, bits)

    def _advance(self, name: str, parameter: nn.Parameter, *, momentum: float) -> Tensor:
        """Update the momentum and return the matrix to orthogonalise, placed as the parameter."""
        assert parameter.grad is not None
        gradient, mean = local_tensor(parameter.grad), local_tensor(self.get_momentum(parameter))
        if parameter.dtype != torch.bfloat16:
            mean.lerp_(gradient, 1.0 - momentum)
            update = gradient.lerp(mean, momentum)  # Nesterov's
            return wrap_like(parameter.data, update.to(_get_device(parameter)))

        update = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        for rows, bits in self.rounding.split_rows(name, parameter):
            wide = rows_of(gradient)[rows].float()
            wide_mean = rows_of(mean)[rows].float().lerp_(wide, 1.0 - momentum)
            rows_of(update)[rows] = wide.lerp(wide_mean, momentum).to(update.dtype)
            round_into(rows_of(mean)[rows], wide_mean, derive_bits(bits)[0])
        return wrap_like(parameter.data, update.to(_get_device(parameter)))

    def _orthogonalize_parts(self, name: str, whole: Tensor) -> Tensor:
        """Orthogonalise and scale each matrix of a parameter, in the parameter's dtype."""
        parts = {name: whole}
        if self.adapter is not None:
            with suppress(KeyError):  # A converter added the parameter.
                self.adapter.hf_names(name)
                parts = self.adapter.to_hf(name, whole)
        dtype = getattr(torch, self.config.compute_dtype)
        updates = []
        for part_AB in parts.values():
            update_AB = orthogonalize(part_AB.to(dtype), num_iterations=NUM_ITERATIONS)
            # The factor that gives an update the size of AdamW's, so that one lr suits both.
            updates.append(update_AB.to(whole.dtype) * (0.2 * math.sqrt(max(part_AB.shape))))
        if len(updates) == 1 and updates[0].shape == whole.shape:
            return updates[0].contiguous()
        assert self.adapter is not None
        return self.adapter.from_hf(name, updates).contiguous()


def orthogonalize(matrix_AB: Tensor, *, num_iterations: int) -> Tensor:
    """Return approximately U V^T of the singular value decomposition U S V^T.

    Singular values end in 0.7 .. 1.2. Values far below the largest need more iterations; 0 stays 0.
    """
    a, b, c = COEFFICIENTS
    # X X^T of a wide matrix is the smaller of the two products.
    tall = matrix_AB.size(0) > matrix_AB.size(1)
    x = matrix_AB.T if tall else matrix_AB
    x = x / x.norm().clamp(min=EPS)  # at least the largest singular value
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _get_device(parameter: nn.Parameter) -> torch.device:
    """Return the device of the computation; the shard may be offloaded to the host."""
    data = parameter.data
    return torch.device(data.device_mesh.device_type) if isinstance(data, DTensor) else data.device
