"""Load balance of a mixture's experts: counted in every layout, reported, and evened out.

Shape legend: T packed tokens of one micro-batch, t those of this rank's routers, K experts of each token,
N experts, L layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import TP
from rl.models.moe import ExpertRouter
from rl.training.config import ExpertBalanceConfig
from rl.types import ExpertLoad


class ExpertBalance:
    """Counts the experts that routers choose, without padding, from one optimizer step to the next."""

    def __init__(
        self, *, config: ExpertBalanceConfig, model: nn.Module, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        for router in self.routers:
            router.force_balance = config.force_load_balance
        num_experts = self.routers[0].load_balance_bias.numel()
        self._of_call_LN = torch.zeros(len(self.routers), num_experts, dtype=torch.float64, device=device)
        self._of_step_LN = torch.zeros_like(self._of_call_LN)

    @torch.no_grad()
    def count(self, real_T: Tensor) -> None:
        """Count the choices of the latest forward pass with a graph.

        Args:
            real_T: [T] bool, True for tokens that are no padding, before tensor parallelism splits them.
        """
        chosen = [router.last_chosen_TK for router in self.routers]
        for router in self.routers:
            router.last_chosen_TK = None
        chosen_LtK = torch.stack([c for c in chosen if c is not None])
        counted_t = self._counted_tokens(real_T, num_tokens=chosen_LtK.size(1))
        num_layers, num_experts = self._of_call_LN.shape
        first_of_layer_L = torch.arange(num_layers, device=chosen_LtK.device) * num_experts
        slots_LtK = chosen_LtK + first_of_layer_L.view(-1, 1, 1)
        ones_LtK = counted_t.double().view(1, -1, 1).expand_as(slots_LtK)
        self._of_call_LN.view(-1).index_add_(0, slots_LtK.flatten(), ones_LtK.flatten())

    def reduce(self) -> ExpertLoad:
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
        for router, move_N in zip(self.routers, moves_LN, strict=True):
            router.load_balance_bias += move_N

    def forget(self) -> None:
        """Reset the counts, as the gradient that they belong to was used or dropped."""
        self._of_call_LN.zero_()
        self._of_step_LN.zero_()

    def _counted_tokens(self, real_T: Tensor, *, num_tokens: int) -> Tensor:
        """Return a mask [t] that counts each token on one of the tensor-parallel ranks that route it."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return real_T
        rank = self.mesh.get_local_rank(TP)
        if num_tokens == real_T.numel():
            return real_T & (rank == 0)
        return real_T.chunk(self.mesh[TP].size())[rank]
