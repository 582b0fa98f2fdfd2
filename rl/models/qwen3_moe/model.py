"""Qwen3's mixture of experts: the dense model with another feed-forward layer.

    Qwen3.Config(..., block=TransformerBlock.Config(attention=..., feed_forward=MoE.Config(...)))

A router chooses K of N experts for each token; each expert is a SwiGLU of its own. The experts'
weights are stacked, their rows sorted by expert, so that one grouped product serves all.

The rows of an expert's fused gate and up projection are ordered by key-value head, as in the
dense model (see there), so tensor parallelism splits an expert at the same places.

Shape legend: T tokens, E model width, N experts, K chosen for each token, S = T * K rows in the
order of their experts, F width of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement

from rl.config.configurable import Configurable
from rl.distributed.expert_parallel import ExpertExchange
from rl.distributed.rows import inverse_permutation, select_rows
from rl.models.grouped_linear import grouped_linear


class Router(nn.Module):
    """Which experts serve a token, and with what weight.

    A bias on the scores, for choosing alone, evens out how often each expert is chosen: after
    every optimizer step the trainer lowers it for those chosen more often than the mean and raises
    it for the others (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts"). At zero this is Hugging Face's router.
    """

    load_balance_bias: Tensor
    """[N] float32 in every layout and dtype, whole on every rank."""

    def __init__(self, *, config: MoE.Config, dim: int) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_token
        self.normalize = config.normalize_weights
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        self.register_buffer("load_balance_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.force_balance = False
        """For measurements: choose the experts in turn, whatever the scores."""
        self.last_chosen_TK: Tensor | None = None
        """Experts of the last forward that kept a graph; the trainer counts them."""

    def reset_buffers(self) -> None:
        """No bias, after `to_empty` has moved the module off the meta device."""
        self.load_balance_bias = torch.zeros_like(self.load_balance_bias, dtype=torch.float32)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] weights in the dtype of `x_TE`, and [T, K] int64 which experts they are of."""
        scores_TN = F.linear(x_TE, local_part(self.weight)).softmax(-1, dtype=torch.float32)
        if self.force_balance:
            chosen_TK = self._in_turn(scores_TN)
        else:
            chosen_TK = (scores_TN.detach() + self.load_balance_bias).topk(self.num_chosen).indices
        weights_TK = scores_TN.gather(1, chosen_TK)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if torch.is_grad_enabled():
            self.last_chosen_TK = chosen_TK
        return weights_TK.to(x_TE.dtype), chosen_TK

    def _in_turn(self, scores_TN: Tensor) -> Tensor:
        num_tokens, num_experts = scores_TN.shape
        turns = torch.arange(num_tokens * self.num_chosen, device=scores_TN.device)
        return (turns % num_experts).view(num_tokens, self.num_chosen)


class GroupedExperts(nn.Module):
    """N experts; under expert parallelism N / P of them, the others on other ranks."""

    def __init__(self, *, config: MoE.Config, dim: int, num_groups: int) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.group_width = config.hidden_dim // num_groups
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, dim, config.hidden_dim))
        self.exchange: ExpertExchange | None = None
        """Set where other ranks hold some of the experts."""

    # Rows are counted on the way: nothing of it has a fixed shape.
    @torch.compiler.disable
    def forward(self, x_TE: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """[T, E]: the chosen experts' results, weighted and summed."""
        expert_S, order_S = chosen_TK.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x_TE.device)
        ends_N = torch.searchsorted(expert_S, experts, right=True)
        places_S = inverse_permutation(order_S)
        rows_SE = select_rows(x_TE, rows_S=order_S // chosen_TK.size(1), places_S=places_S)
        if self.exchange is None:
            out_SE = self.compute(rows_SE, ends_N)
        else:
            out_SE = self.exchange(rows_SE, ends_N, self.compute)
        out_TKE = select_rows(out_SE, rows_S=places_S, places_S=order_S).unflatten(0, chosen_TK.shape)
        return (out_TKE * weights_TK.unsqueeze(-1)).sum(1)

    def compute(self, rows_SE: Tensor, ends_N: Tensor) -> Tensor:
        """[S, E]: each row through its expert; rows of the first end at `ends_N[0]`, and so on."""
        gate_up = grouped_linear(rows_SE, local_part(self.gate_up_proj), ends_N)
        # Under tensor parallelism this rank holds some of the groups: -1 counts them.
        gate, up = gate_up.unflatten(-1, (-1, 2, self.group_width)).unbind(dim=2)
        return grouped_linear((F.silu(gate) * up).flatten(1), local_part(self.down_proj), ends_N)


class MoE(Configurable, nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        num_experts_per_token: int
        hidden_dim: int
        """Feed-forward width of one expert."""
        normalize_weights: bool = True
        """The weights of a token's experts sum to 1."""

        def __post_init__(self) -> None:
            if not 1 <= self.num_experts_per_token <= self.num_experts:
                raise ValueError(
                    f"num_experts_per_token={self.num_experts_per_token}: must be 1 to "
                    f"num_experts={self.num_experts}"
                )

    def __init__(self, *, config: Config, dim: int, num_groups: int) -> None:
        super().__init__()
        if config.hidden_dim % num_groups:
            raise ValueError(f"hidden_dim={config.hidden_dim} is not a multiple of num_kv_heads={num_groups}")
        self.router = Router(config=config, dim=dim)
        self.experts = GroupedExperts(config=config, dim=dim, num_groups=num_groups)

    def forward(self, x_TE: Tensor) -> Tensor:
        weights_TK, chosen_TK = self.router(x_TE)
        out_TE: Tensor = self.experts(x_TE, weights_TK, chosen_TK)
        return out_TE


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part as a plain tensor, with gradient.

    Ranks that hold the same part use it for different tokens, or for their own share of each
    token's result: the gradient of the whole is the sum of theirs.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements: list[Placement] = [Partial() if p.is_replicate() else p for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)
