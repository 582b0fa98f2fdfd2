"""Mixture-of-experts layer, in place of a decoder's feed-forward layer.

    Decoder.Config(..., block=TransformerBlock.Config(attention=..., feed_forward=MoE.Config(...)))

A router chooses K of N experts for each token; each expert is a SwiGLU. The experts' weights are
stacked and the rows of a batch sorted by expert, so that one grouped product serves all experts.

The rows of an expert's fused gate and up projection are ordered by key-value head, as in the dense
layer (`rl.models.decoder`), so tensor parallelism splits an expert at the same places.

Experts of a mixture can be split in three ways, alone or together:

- FSDP, like every parameter of a block.
- Expert parallelism: groups of neighbours among the ranks that shard parameters hold different
  experts and send each other tokens. FSDP then shards a rank's experts over the ranks that hold the
  same ones.
- Tensor parallelism. A rank either keeps its T / tp tokens and all experts, or the layer gathers
  the tokens, each rank computes its part of every expert, and the sums are scattered again. Either
  way the router's gradient is a sum over the ranks.

Shape legend: T tokens, E model width, N experts, K chosen for each token, S = T * K rows in the
order of their experts, F width of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rl.config.configurable import Configurable
from rl.distributed.expert_parallel import ExpertExchange, invert_permutation, select_rows
from rl.distributed.mesh import EXPERT, TP
from rl.distributed.sharding import ShardingOptions, distribute, own_part

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the experts' weights."""
TOKENS = 0
EXPERTS = 0
ROWS_OF_EXPERT = 1
COLUMNS_OF_EXPERT = 2
AddToGroups = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(output [S, F], rows [S, E], ends [N], tokens [S]) -> output with the rows' products of adapters.

The tokens are those that the rows are copies of, None for rows of other ranks.
"""
_ALIGNMENT = 16
"""Bytes; rows of the grouped kernel have to start at a multiple."""


class ExpertRouter(nn.Module):
    """Choice of experts for each token, with their weights.

    A bias on the scores, used for the choice only, evens out the load: after every optimizer step
    the trainer lowers it for experts chosen more often than the mean and raises it for the others
    (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"). At
    zero this is Hugging Face's router.
    """

    load_balance_bias: Tensor
    """[N] float32 in every layout and dtype, whole on every rank."""

    def __init__(self, *, config: MoE.Config, dim: int) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_token
        self.normalize = config.normalize_weights
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        # Persistent: it belongs to the weights, although no gradient changes it.
        self.register_buffer(
            "load_balance_bias", torch.zeros(config.num_experts, dtype=torch.float32)
        )
        self.force_balance = False
        """Choose the experts in turn regardless of the scores; for measurements."""
        self.last_chosen_TK: Tensor | None = None
        """Experts chosen in the last forward with a graph; read by the trainer's load counters."""

    def reset_buffers(self) -> None:
        """Zero the bias after `to_empty` has moved the module off the meta device."""
        self.load_balance_bias = torch.zeros_like(self.load_balance_bias, dtype=torch.float32)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] in the dtype of `x_TE` and the chosen experts [T, K] int64."""
        scores_TN = F.linear(x_TE, own_part(self.weight)).softmax(-1, dtype=torch.float32)
        num_tokens, num_experts = scores_TN.shape
        if self.force_balance:
            turns = torch.arange(num_tokens * self.num_chosen, device=x_TE.device)
            chosen_TK = turns.view(-1, self.num_chosen) % num_experts
        else:
            chosen_TK = (scores_TN.detach() + self.load_balance_bias).topk(self.num_chosen).indices

        # The bias decides the choice alone: the weights, and the gradient, are of the plain scores.
        weights_TK = scores_TN.gather(1, chosen_TK)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        # A forward without a graph must not replace the choice that the load counters read.
        if torch.is_grad_enabled():
            self.last_chosen_TK = chosen_TK
        return weights_TK.to(x_TE.dtype), chosen_TK


class GroupedExperts(nn.Module):
    """Weights of N experts; under expert parallelism N / P of them on each of P ranks."""

    never_compiled = True
    """The number of rows of each expert changes with every batch."""

    def __init__(self, *, config: MoE.Config, dim: int, num_groups: int) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.group_width = config.hidden_dim // num_groups
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.hidden_dim, dim)
        )
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, dim, config.hidden_dim))
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = multiply_groups
        """Product of rows with the weights of their groups; a converter may round it."""
        self.adapters: dict[str, AddToGroups] = {}
        """Low-rank products to add, by the name of the weights that they stand beside."""
        self.exchange: ExpertExchange | None = None
        """Transport of rows to the ranks that hold their experts, under expert parallelism."""

    def forward(self, x_TE: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' results, [T, E]."""
        # Stable: the rows of an expert keep the order of the tokens, so sums are reproducible.
        expert_S, order_S = chosen_TK.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x_TE.device)
        ends_N = torch.searchsorted(expert_S, experts, right=True)
        places_S = invert_permutation(order_S)

        tokens_S = order_S // chosen_TK.size(1)
        rows_SE = select_rows(x_TE, rows_S=tokens_S, places_S=places_S)
        if self.exchange is None:
            out_SE = self.compute(rows_SE, ends_N, tokens_S)
        else:
            out_SE = self.exchange(rows_SE, ends_N, self.compute)

        # Back in the order of the tokens, where each token's K rows are neighbours.
        out_SE = select_rows(out_SE, rows_S=places_S, places_S=order_S)
        out_TKE = out_SE.unflatten(0, chosen_TK.shape)
        return (out_TKE * weights_TK.unsqueeze(-1)).sum(1)

    def compute(self, rows_SE: Tensor, ends_N: Tensor, tokens_S: Tensor | None = None) -> Tensor:
        """Return each row's result from its expert, [S, E]; rows of expert n end at `ends_N[n]`.

        `tokens_S` are the tokens that the rows are copies of.
        """

        def multiply(name: str, x_SI: Tensor) -> Tensor:
            out_SO = self.product(x_SI, own_part(getattr(self, name)), ends_N)
            add = self.adapters.get(name)
            return out_SO if add is None else add(out_SO, x_SI, ends_N, tokens_S)

        gate_up = multiply(GATE_UP, rows_SE)
        # Under tensor parallelism this rank holds some of the groups: -1 counts them.
        gate, up = gate_up.unflatten(-1, (-1, 2, self.group_width)).unbind(dim=2)
        return multiply(DOWN, (F.silu(gate) * up).flatten(1))


class MoE(Configurable, nn.Module):
    """Mixture of experts: a router and N experts, of which each token uses K, [T, E] to [T, E].

    It has the interface of `FeedForward`, in whose place a block builds it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Number and width of the experts, and how many a token uses."""

        num_experts: int
        num_experts_per_token: int
        hidden_dim: int
        """Feed-forward width of one expert."""
        normalize_weights: bool = True
        """Scale the weights of a token's experts to a sum of 1."""

        def __post_init__(self) -> None:
            if not 1 <= self.num_experts_per_token <= self.num_experts:
                raise ValueError(
                    f"num_experts_per_token={self.num_experts_per_token}: must be 1 to "
                    f"num_experts={self.num_experts}"
                )

    def __init__(self, *, config: Config, dim: int, num_kv_heads: int) -> None:
        super().__init__()
        # As in the dense layer: a degree that divides both sizes divides the number of groups.
        num_groups = math.gcd(config.hidden_dim, num_kv_heads)
        self.router = ExpertRouter(config=config, dim=dim)
        self.experts = GroupedExperts(config=config, dim=dim, num_groups=num_groups)

    def forward(self, x_TE: Tensor) -> Tensor:
        weights_TK, chosen_TK = self.router(x_TE)
        out_TE: Tensor = self.experts(x_TE, weights_TK, chosen_TK)
        return out_TE

    def shard(self, mesh: DeviceMesh, *, config: ShardingOptions) -> None:
        """Make router and experts DTensors on the axes that sum, or separate, their gradients."""
        tp, expert_mesh, experts = mesh[TP], config.expert_mesh, self.experts
        if tp.size() > 1:
            self.router.weight = distribute(self.router.weight, tp, [Replicate()])

        rows: Placement = Replicate()
        columns: Placement = Replicate()
        if config.parallelism.expert_tensor_parallel_degree > 1 and tp.size() > 1:
            rows, columns = Shard(ROWS_OF_EXPERT), Shard(COLUMNS_OF_EXPERT)
            self.register_forward_pre_hook(partial(_gather_tokens, tp))
            self.register_forward_hook(partial(_scatter_sums, tp))

        if expert_mesh is not None:
            experts.exchange = ExpertExchange(expert_mesh[EXPERT].get_group())
        elif tp.size() == 1:
            return
        for name, placement in ((GATE_UP, rows), (DOWN, columns)):
            axes, placements = tp, [placement]
            if expert_mesh is not None:
                axes = expert_mesh[EXPERT, TP] if tp.size() > 1 else expert_mesh[EXPERT]
                placements = [Shard(EXPERTS), placement][: axes.ndim]
            setattr(experts, name, distribute(getattr(experts, name), axes, placements))

    def shard_for_generation(self, mesh: DeviceMesh) -> None:
        """Split each expert over a mesh of one axis.

        Every rank chooses the same experts, and one sum combines the parts.
        """
        experts = self.experts
        experts.gate_up_proj = distribute(experts.gate_up_proj, mesh, [Shard(ROWS_OF_EXPERT)])
        experts.down_proj = distribute(experts.down_proj, mesh, [Shard(COLUMNS_OF_EXPERT)])
        self.register_forward_hook(partial(_sum_over_ranks, mesh.get_group()))


def _gather_tokens(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Gather all T tokens from T / tp of each rank.

    The gradients of the ranks' partial results are summed.
    """
    parts = DTensor.from_local(args[0], mesh, [Shard(TOKENS)], run_check=False)
    return (parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),)


def _scatter_sums(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], out_TE: Tensor
) -> Tensor:
    """Sum partial results for all T tokens, and return those of this rank's T / tp."""
    parts = DTensor.from_local(out_TE, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Shard(TOKENS)]).to_local()


def _sum_over_ranks(
    group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...], out_TE: Tensor
) -> Tensor:
    """Sum the ranks' outputs in place."""
    dist.all_reduce(out_TE, group=group)
    return out_TE


def multiply_groups(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """Return [S, F], each group's rows times the weight of the group.

    One kernel without host synchronization for bfloat16 on a GPU; one product per group elsewhere.

    Args:
        ends_N: int64, the end of each group's rows: non-decreasing, the last is S.

    Example:
        Rows 0 and 1 belong to the first of two groups, row 2 to the second:

        >>> weight_NFE = torch.stack((torch.eye(2), 10 * torch.eye(2)))
        >>> multiply_groups(torch.ones(3, 2), weight_NFE, torch.tensor([2, 3]))
        tensor([[ 1.,  1.],
                [ 1.,  1.],
                [10., 10.]])
    """
    if _uses_one_kernel(x_SE, weight_NFE):
        return multiply_in_one_kernel(x_SE, weight_NFE, ends_N)
    product: Tensor = _GroupedLinear.apply(x_SE, weight_NFE, ends_N.tolist())
    return product


def multiply_in_one_kernel(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """Compute `multiply_groups` with PyTorch's grouped product.

    Widths that the product does not take are padded with zeros.
    """
    multiple = _ALIGNMENT // x_SE.element_size()
    width = weight_NFE.size(1)
    missing_E, missing_F = -weight_NFE.size(2) % multiple, -width % multiple
    if missing_E or missing_F:
        x_SE = F.pad(x_SE, (0, missing_E))
        weight_NFE = F.pad(weight_NFE, (0, missing_E, 0, missing_F))
    out = torch.nn.functional.grouped_mm(
        x_SE, weight_NFE.transpose(1, 2), offs=ends_N.to(torch.int32)
    )
    assert isinstance(out, Tensor)
    return out.narrow(1, 0, width) if missing_F else out


def _uses_one_kernel(x_SE: Tensor, weight_NFE: Tensor) -> bool:
    # An empty batch would launch nothing and leave gradients None where zeros are needed.
    if not x_SE.is_cuda or x_SE.dtype != torch.bfloat16 or not x_SE.size(0):
        return False
    return torch.cuda.get_device_capability(x_SE.device) >= (8, 0)


class _GroupedLinear(torch.autograd.Function):
    """One product per group; the gradient of a group without rows is zero."""

    @staticmethod
    def forward(ctx: Any, x_SE: Tensor, weight_NFE: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x_SE, weight_NFE)
        ctx.ends = ends
        # Separate products, so that selective checkpointing can keep them.
        products: list[Tensor] = []
        for rows, weight_FE in zip(slice_groups(ends), weight_NFE, strict=True):
            product = torch.mm(x_SE[rows], weight_FE.t())
            products.append(product)
        return torch.cat(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SE, weight_NFE = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_SF = grad_SF.contiguous()
        # Written group by group: every row belongs to a group, and a product of no rows writes 0.
        grad_x = torch.empty_like(x_SE) if needs_x else None
        grad_weight = torch.empty_like(weight_NFE) if needs_weight else None
        for n, rows in enumerate(slice_groups(ctx.ends)):
            if grad_x is not None:
                torch.mm(grad_SF[rows], weight_NFE[n], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad_SF[rows].t(), x_SE[rows], out=grad_weight[n])
        return grad_x, grad_weight, None


def slice_groups(ends: list[int]) -> list[slice]:
    """Return the rows of each group, given their ends."""
    return [slice(start, end) for start, end in pairwise([0, *ends])]
