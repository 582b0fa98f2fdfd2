"""Load balance of a mixture's experts: counted in every layout, reported, and evened out.

Shape legend: T packed tokens of one micro-batch, t those of this rank's routers, K experts of each
token, N experts, L layers of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import TP
from rl.models.layers.moe import ExpertRouter
from rl.trainer_types import ExpertLoad
from rl.training.config import ExpertBalanceConfig


class ExpertBalance:
    """Counts the experts that routers choose, without padding, between two optimizer steps."""

    def __init__(
        self,
        *,
        config: ExpertBalanceConfig,
        parts: Sequence[nn.Module],
        num_layers: int,
        num_experts: int,
        mesh: DeviceMesh | None,
        device: torch.device,
        mask_real_tokens: Callable[[], Tensor],
    ) -> None:
        """
        Args:
            parts: this rank's parts of the model, in the names of whose routers the first number is
                the layer's.
            mask_real_tokens: returns the mask [T] of the latest micro-batch, True for tokens that
                are no padding, before tensor parallelism splits them.
        """
        self.config = config
        self.mesh = mesh
        self._mask_real_tokens = mask_real_tokens
        self._routers: dict[nn.Module, dict[int, ExpertRouter]] = {}
        """Routers of each part by layer."""
        for part in parts:
            self._routers[part] = {}
            for name, module in part.named_modules():
                if isinstance(module, ExpertRouter):
                    self._routers[part][_parse_layer(name)] = module
            # Logprobs and evaluations have no gradient, and do not count.
            part.register_forward_hook(
                lambda part, *_: self.count(part) if torch.is_grad_enabled() else None
            )
        for router in self._all_routers.values():
            router.force_balance = config.force_load_balance
        self._of_call_LN = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        self._of_step_LN = torch.zeros_like(self._of_call_LN)

    @property
    def _all_routers(self) -> dict[int, ExpertRouter]:
        routers: dict[int, ExpertRouter] = {}
        for of_part in self._routers.values():
            routers |= of_part
        return routers

    @torch.no_grad()
    def count(self, part: nn.Module) -> None:
        """Count the choices of a part's latest forward pass, which had a graph."""
        if not self._routers[part]:
            return
        layers, chosen = [], []
        for layer, router in self._routers[part].items():
            assert router.last_chosen_TK is not None, "every layer routes all tokens"
            layers.append(layer)
            chosen.append(router.last_chosen_TK)
            router.last_chosen_TK = None

        # One kernel for all layers: an index into [L N], the same weight for all K of a token.
        chosen_LtK = torch.stack(chosen)
        counted_t = self._mask_counted_tokens(
            self._mask_real_tokens(), num_tokens=chosen_LtK.size(1)
        )
        num_experts = self._of_call_LN.size(1)
        first_of_layer_L = num_experts * torch.tensor(layers, device=chosen_LtK.device)
        slots_LtK = chosen_LtK + first_of_layer_L.view(-1, 1, 1)
        ones_LtK = counted_t.double().view(1, -1, 1).expand_as(slots_LtK)
        self._of_call_LN.view(-1).index_add_(0, slots_LtK.flatten(), ones_LtK.flatten())

    def reduce(self) -> ExpertLoad:
        """Sum a call's counts over ranks, add them to the step's, and return their balance."""
        counts_LN, self._of_call_LN = self._of_call_LN, torch.zeros_like(self._of_call_LN)
        if self.mesh is not None:
            dist.all_reduce(counts_LN)
        self._of_step_LN += counts_LN
        # A call has tokens, and every layer routes all of them.
        busiest_L = counts_LN.amax(1) / counts_LN.mean(1)
        mean, largest = torch.stack((busiest_L.mean(), busiest_L.amax())).tolist()
        return ExpertLoad(busiest_mean=mean, busiest_max=largest)

    @torch.no_grad()
    def step(self) -> None:
        """Move each expert's bias by the rate against its load; called after an optimizer step."""
        if not self.config.load_balance_rate:
            return
        below_mean_LN = self._of_step_LN.mean(1, keepdim=True) - self._of_step_LN
        moves_LN = self.config.load_balance_rate * below_mean_LN.sign().float()
        for layer, router in self._all_routers.items():
            router.load_balance_bias += moves_LN[layer]

    def forget(self) -> None:
        """Reset the counts, as the gradient that they belong to was used or dropped."""
        self._of_call_LN.zero_()
        self._of_step_LN.zero_()

    def _mask_counted_tokens(self, real_T: Tensor, *, num_tokens: int) -> Tensor:
        """Return a mask [t] that counts each token on one of the ranks that route it."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return real_T
        rank = self.mesh.get_local_rank(TP)
        # Routers see all tokens on every tensor-parallel rank, or each rank its part of them.
        if num_tokens == real_T.numel():
            return real_T & (rank == 0)
        return real_T.chunk(self.mesh[TP].size())[rank]


def _parse_layer(name: str) -> int:
    """Return 3 of `layers.3.feed_forward.router`."""
    return next(int(part) for part in name.split(".") if part.isdecimal())
