"""How evenly a mixture's experts are used: counted in every layout, reported, and evened out.

Shape legend: T packed tokens of one micro-batch, t those of this rank's routers, K experts of each
token, N experts, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.config.configurable import Configurable
from rl.distributed.mesh import TP
from rl.models.converters.converter import ModelConverter
from rl.models.converters.float8 import Float8
from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe.model import MoE, Router
from rl.types import ExpertLoad


class ExpertBalance(Configurable):
    """Counts what the routers choose, padding not, from one optimizer step to the next.

    Of a model without experts it does nothing.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        load_balance_rate: float = 0.0
        """How far the bias of an expert moves after each optimizer step, against its load; 0 leaves the
        bias as it is. 0.001 is usual for scores that sum to 1."""
        force_load_balance: bool = False
        """For measurements alone: tokens go to the experts in turn, not to those that the router chose.
        The model is then another one, and another in each layout."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.load_balance_rate < float("inf"):
                raise ValueError(
                    f"experts.load_balance_rate={self.load_balance_rate}: must be a finite number, at least 0"
                )
            if self.load_balance_rate and self.force_load_balance:
                raise ValueError(
                    f"experts.load_balance_rate={self.load_balance_rate}: must be 0 with "
                    "experts.force_load_balance, under which no score and no bias chooses"
                )

    def __init__(
        self, *, config: Config, model: nn.Module, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        for router in self.routers:
            router.force_balance = config.force_load_balance
        num_experts = self.routers[0].load_balance_bias.numel() if self.routers else 0
        self._of_call_LN = torch.zeros(len(self.routers), num_experts, dtype=torch.float64, device=device)
        self._of_step_LN = torch.zeros_like(self._of_call_LN)

    @torch.no_grad()
    def count(self, real_T: Tensor) -> None:
        """What the routers chose in the forward that was just made with a graph.

        Args:
            real_T: [T] bool, which of its tokens are no padding, before tensor parallelism splits them.
        """
        if not self.routers:
            return
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

    def _counted_tokens(self, real_T: Tensor, *, num_tokens: int) -> Tensor:
        """[t] bool: each of them on one of the tensor-parallel ranks that route it."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return real_T
        rank = self.mesh.get_local_rank(TP)
        if num_tokens == real_T.numel():
            return real_T & (rank == 0)
        return real_T.chunk(self.mesh[TP].size())[rank]

    def reduce(self) -> ExpertLoad | None:
        """Of the forwards since the last `reduce`, over all ranks: one collective, one wait."""
        if not self.routers:
            return None
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
        """After an optimizer step: move each expert's bias by the rate, against its load."""
        if not self.routers or not self.config.load_balance_rate:
            return
        below_mean_LN = self._of_step_LN.mean(1, keepdim=True) - self._of_step_LN
        moves_LN = self.config.load_balance_rate * below_mean_LN.sign().float()
        for router, move_N in zip(self.routers, moves_LN, strict=True):
            router.load_balance_bias += move_N

    def forget(self) -> None:
        """The gradient was used or dropped: so is what was counted for it."""
        self._of_call_LN.zero_()
        self._of_step_LN.zero_()


def check_experts(
    model: Qwen3.Config,
    *,
    balance: ExpertBalance.Config,
    converters: Sequence[ModelConverter.Config],
) -> None:
    """Whether what is asked of the experts can be done; the degrees are checked by the model's spec.

    Raises:
        ValueError: names the field: whatever is set for a model without experts, and Float8 for one with.
    """
    balance.__post_init__()  # A field may have been edited since.
    if not isinstance(model.block.feed_forward, MoE.Config):
        for name, value, off in (
            ("load_balance_rate", balance.load_balance_rate, 0.0),
            ("force_load_balance", balance.force_load_balance, False),
        ):
            if value != off:
                raise ValueError(f"experts.{name}={value}: must be {off} for a model without experts")
        return
    if any(isinstance(converter, Float8.Config) for converter in converters):
        raise ValueError(
            "converters has Float8: must not for a model with experts, whose grouped products, most of its "
            "arithmetic, it would leave as they are"
        )
