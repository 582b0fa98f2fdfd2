"""Low-rank adapter of a frozen weight: W + s B A.

One of our fused weights consists of several Hugging Face weights, regrouped by rows
(`rl.models.adapter`). Each of them gets factors of its own, as in PEFT: the A's are stacked, and a
row of B belongs to the A of the weight that the row came from. The weights of a mixture's experts
are a stack, and so are their factors, with the expert as the first dimension.

Shape legend: T tokens, I input width, O output rows of the fused weight, N adapted weights fused in
it, R rank, X experts, S rows in the order of their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from rl.distributed.sharding import (
    distribute,
    gather_whole,
    local_tensor,
    own_part,
    slice_local_shard,
    wrap_like,
)

SUFFIX = "_lora"
"""Ending of an adapter's name, after that of the layer next to it."""
FACTORS = ("lora_a", "lora_b")


class LowRank(nn.Module):
    """Adapter next to an unchanged weight [O, I], or the stack [X, O, I] of a mixture's experts.

    `add_to` adds the product to a linear layer's output, `add_to_groups` to that of experts.

    Under tensor parallelism the factors follow the weight: B is split if the weight is split by
    rows, A if it is split by columns, and both if it is split by experts. Each rank adds its own
    part without communication; its gradient of a factor that it holds whole is a partial sum, which
    `optim_step` completes.
    """

    rows_ON: Tensor
    """Assignment of this rank's rows of B to the A's."""

    def __init__(
        self,
        weight: Tensor,
        *,
        source_O: Tensor,
        adapted: Mapping[str, int],
        rank: int,
        scale: float,
    ) -> None:
        """Allocate the factors of a weight.

        Args:
            source_O: number of the Hugging Face weight that each row of our weight came from; the
                rows of all experts come from the same numbers.
            adapted: Hugging Face names of the weights that get factors, with their numbers; expert
                by expert.
            scale: s.
        """
        super().__init__()
        self.adapted = tuple(adapted)
        self.rank = rank
        self.scale = scale
        self.has_fixed_order = False
        """Compute each row in one order of operations, as a generator does on a CPU."""
        numbers = dict.fromkeys(adapted.values())
        *stack, num_out, num_in = weight.shape
        self.lora_a = nn.Parameter(weight.new_empty(*stack, len(numbers) * rank, num_in))
        self.lora_b = nn.Parameter(weight.new_empty(*stack, num_out, rank))
        sources_ON = [source_O == number for number in numbers]
        self._whole_rows_ON = torch.stack(sources_ON, dim=1)
        # With one A for all rows the mask is all ones, and the products are plain.
        self._everywhere = bool(self._whole_rows_ON.all())
        # This rank's part of the rows, until `follow` divides them.
        self._rows_split, self._rows_index = 1, 0
        self.register_buffer("rows_ON", self.take_local_rows(weight.device), persistent=False)

    def take_local_rows(self, device: torch.device) -> Tensor:
        """Return the assignment of this rank's rows of B to the A's, [O, N] bool."""
        return self._whole_rows_ON.chunk(self._rows_split)[self._rows_index].to(device)

    def reset_buffers(self) -> None:
        """Recompute the mask after `to_empty` has moved the module off the meta device."""
        self.rows_ON = self.take_local_rows(self.rows_ON.device)

    def follow(self, weight: Tensor) -> None:
        """Shard the factors like the weight over its tensor-parallel and expert-parallel mesh.

        Call it before data parallelism. Nothing changes for a plain weight.
        """
        if not isinstance(weight, DTensor):
            return
        mesh = weight.device_mesh
        # A has the weight's columns, B its rows, and both its experts; R is never split.
        rows, columns = weight.ndim - 2, weight.ndim - 1
        of_a: list[Placement] = []
        of_b: list[Placement] = []
        for axis, placement in enumerate(weight.placements):
            of_a.append(Replicate() if placement.is_shard(rows) else placement)
            of_b.append(Replicate() if placement.is_shard(columns) else placement)
            if placement.is_shard(rows):
                self._rows_split, self._rows_index = mesh.size(axis), mesh.get_local_rank(axis)
        self.lora_a = distribute(self.lora_a, mesh, of_a)
        self.lora_b = distribute(self.lora_b, mesh, of_b)
        self.rows_ON = self.take_local_rows(self.rows_ON.device)

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output for `x` plus the product, inside the tensor-parallel hooks."""
        added = self.factors.add_to(_take_part(output), own_part(x))
        return wrap_like(output, added)

    def add_to_groups(
        self,
        output_SO: Tensor,
        x_SI: Tensor,
        ends_X: Tensor,
        *,
        multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the output of experts plus each row's product with its expert's factors.

        Args:
            ends_X: end of each expert's rows.
            multiply: grouped product of rows with the weights of their experts.
        """
        low = multiply(x_SI, own_part(self.lora_a), ends_X)
        spread = self.spread_by_source(own_part(self.lora_b), self.rows_ON)
        return torch.add(output_SO, multiply(low, spread, ends_X), alpha=self.scale)

    @property
    def factors(self) -> Factors:
        """This rank's parts of the factors, with gradients."""
        return Factors(
            a=own_part(self.lora_a), b=own_part(self.lora_b), layer=self, rows_ON=self.rows_ON
        )

    def gather_factors(self) -> Factors:
        """Return the whole factors on every rank, all of which then compute the same."""
        whole: list[Tensor] = []
        for factor in (self.lora_a, self.lora_b):
            if isinstance(factor, DTensor):
                replicated = factor.redistribute(placements=[Replicate()] * factor.device_mesh.ndim)
                whole.append(replicated.to_local())
            else:
                whole.append(factor)
        rows_ON = self._whole_rows_ON.to(self.rows_ON.device)
        return Factors(a=whole[0], b=whole[1], layer=self, rows_ON=rows_ON)

    @torch.no_grad()
    def merge_without_gradient(self, weight: Tensor) -> Tensor:
        """Return W + s B A in W's layout and dtype, summed in float32."""
        local = local_tensor(weight)
        merged = torch.empty(local.shape, dtype=weight.dtype, device=local.device)
        for place, update in self.yield_updates(weight):
            merged[place] = local[place].float() + update
        return wrap_like(weight, merged)

    @torch.no_grad()
    def yield_updates(self, weight: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield this rank's part of s B A in float32, [O, I], with its place in that of W.

        Collective, so every rank must consume all.
        """
        # Only the factors are gathered: each rank computes the part of the product that it holds.
        a = gather_whole(self.lora_a.detach()).float()
        b = gather_whole(self.lora_b.detach()).float()
        if not local_tensor(weight).numel():
            return
        *experts, rows, columns = _find_local_indices(weight)
        b = self.spread_by_source(b, self._whole_rows_ON.to(b.device))
        if not experts:
            yield ..., self.scale * (b[rows] @ a[:, columns])
            return
        # Expert by expert: all products in float32 would be twice a layer of experts in bfloat16.
        for place, expert in enumerate(experts[0].tolist()):
            yield place, self.scale * (b[expert][rows] @ a[expert][:, columns])

    def spread_by_source(self, b_OR: Tensor, rows_ON: Tensor) -> Tensor:
        """Return each row of B in the columns of its own A, with zeros elsewhere, [O, N * R]."""
        if self._everywhere:
            return b_OR
        return (b_OR.unsqueeze(-2) * rows_ON.unsqueeze(2)).flatten(-2)

    def gather_by_source(self, grad_ONR: Tensor, rows_ON: Tensor) -> Tensor:
        """Return the gradient of B from that of `spread_by_source`, [O, R]."""
        if self._everywhere:
            return grad_ONR
        return (grad_ONR.unflatten(1, (-1, self.rank)) * rows_ON.unsqueeze(2)).sum(1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Factors:
    """Plain tensors of an adapter: all of them, or a tensor-parallel rank's part."""

    a: Tensor
    """[N * R, I], of experts [X, N * R, I]"""
    b: Tensor
    """[O, R], of experts [X, O, R]"""
    layer: LowRank
    rows_ON: Tensor

    def to(self, dtype: torch.dtype) -> Factors:
        return replace(self, a=self.a.to(dtype), b=self.b.to(dtype))

    def add_to(self, output_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Return the output plus s x A^T B^T, rounded once."""
        layer = self.layer
        if layer.has_fixed_order:
            # Imported here, because only this mode needs numba.
            from rl.models.low_rank.products import add_in_fixed_order

            return add_in_fixed_order(output_TO, x_TI, self)
        # Two thin products: T R (I + O) multiply-adds, where W + s B A would cost I R O and memory.
        low = F.linear(x_TI, self.a)
        spread = layer.spread_by_source(self.b, self.rows_ON)
        return torch.addmm(output_TO, low, spread.t(), alpha=layer.scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdaptedWeight:
    """The output head's weight and its adapter, for functions that compute logits with them."""

    weight: Tensor
    """[V, E]"""
    adapter: LowRank
    dtype: torch.dtype
    """Dtype of the product."""

    def get_factors(self, *, whole: bool = False) -> Factors:
        """Return this rank's parts of the factors, or the whole factors on every rank."""
        factors = self.adapter.gather_factors() if whole else self.adapter.factors
        return factors.to(self.dtype)


def _take_part(output: Tensor) -> Tensor:
    """Return this rank's part of a layer's output, whose gradient is that of the sum over ranks."""
    if not isinstance(output, DTensor):
        return output
    # A rank's summand of a sum has the gradient of the sum.
    of_gradient = [Replicate() if p.is_partial() else p for p in output.placements]
    return output.to_local(grad_placements=of_gradient)


def find_adapted_weights(model: nn.Module) -> Iterator[tuple[Tensor, LowRank]]:
    """Yield the adapted weights of a model, sharded or not, with their adapters."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, LowRank):
                # A linear layer, or a parameter with the weights of all experts.
                base = getattr(module, name.removesuffix(SUFFIX))
                yield base if isinstance(base, Tensor) else base.weight, child


def follow_base_weights(model: nn.Module) -> None:
    """Shard all adapters like their weights; after tensor and expert, before data parallelism."""
    for weight, adapter in find_adapted_weights(model):
        adapter.follow(weight)


def _find_local_indices(weight: Tensor) -> list[Tensor]:
    """Return the experts, rows and columns of the whole weight that this rank holds.

    It must hold some. Without experts there are rows and columns alone.
    """
    indices: list[Tensor] = []
    for dim, size in enumerate(weight.shape):
        # A table of the numbers along a dimension, without memory, of which this rank's shard is
        # taken.
        shape = [1] * weight.ndim
        shape[dim] = size
        table = torch.arange(size, device=weight.device).view(shape).expand(weight.shape)
        shard = slice_local_shard(table, weight).movedim(dim, -1)
        indices.append(shard[(0,) * (weight.ndim - 1)])
    return indices
