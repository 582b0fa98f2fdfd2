"""How many parameters one rank of a layout has, counted on a model without memory.

The model is as its converters left it: adapters are parameters too, and what is frozen has neither a
gradient nor a state of the optimizer. Exact up to the padding of shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from rl.distributed.mesh import Degrees
from rl.models.converters.low_rank import adapted_layers
from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe.model import GroupedExperts
from rl.training.muon import is_hidden_matrix

SPLIT_BY_COLUMNS = ("o_proj", "down_proj")
"""Under tensor parallelism, as are their adapters' A; of other layers rows are split, and the adapters' B."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Parameters that FSDP gathers at once, of one tensor-parallel rank."""

    parameters: int
    trained: int
    in_float8: int
    """Are gathered in one byte each."""

    def num_bytes(self, itemsize: int) -> int:
        """Of the parameters, gathered in a dtype of `itemsize` bytes."""
        return (self.parameters - self.in_float8) * itemsize + self.in_float8


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Of parameters on one rank."""

    local: int
    """Its shards."""
    trained: int
    """Of them those that have a gradient and are stepped."""
    trained_matrices: int
    """Of these those that Muon steps."""
    gathered: int
    """All of one tensor-parallel rank."""
    root: Gathered
    """Outside the blocks."""
    head: int
    """Of the root's those whose gradient is there as soon as backward starts: all but an embedding that is
    not the output head too."""
    block: Gathered
    """Of one block, without experts that are gathered for themselves."""
    experts: Gathered
    """Of one block's experts where FSDP gathers these for themselves, under expert parallelism."""
    num_layers: int
    largest: int
    """Of the largest matrix that is trained, whole."""
    merged: int
    """Shards of weights with adapters: each has a merged copy when weights are pushed."""
    largest_merged: int
    """The largest of these shards."""

    @classmethod
    def of(cls, module: Qwen3, degrees: Degrees) -> ParameterCounts:
        parameters = dict(module.named_parameters())
        ranks = _Ranks(module, degrees)
        of_blocks = [p for name, p in parameters.items() if name.startswith("layers.")]
        apart = [p for p in of_blocks if p in ranks.experts] if degrees.ep > 1 else []
        together = [p for p in of_blocks if p not in set(apart)]
        in_blocks = set(of_blocks)
        of_root = [p for p in parameters.values() if p not in in_blocks]
        embedding = module.embed_tokens.weight if module.lm_head is not None else None
        trained = [p for p in parameters.values() if p.requires_grad]
        matrices = [p for name, p in parameters.items() if p.requires_grad and is_hidden_matrix(name, p)]
        adapted = [linear.weight for linear, _ in adapted_layers(module)]
        num_layers = len(module.layers)
        return cls(
            local=ranks.shards(parameters.values()),
            trained=ranks.shards(trained),
            trained_matrices=ranks.shards(matrices),
            gathered=ranks.gathered(parameters.values()),
            root=ranks.gathered_at_once(of_root),
            head=ranks.gathered([p for p in of_root if p.requires_grad and p is not embedding]),
            block=ranks.gathered_at_once(together, among=num_layers),
            experts=ranks.gathered_at_once(apart, among=num_layers),
            num_layers=num_layers,
            largest=max((p.numel() for p in matrices or trained), default=0),
            merged=ranks.shards(adapted),
            largest_merged=max((ranks.shards([weight]) for weight in adapted), default=0),
        )


class _Ranks:
    """How parameters are split over them."""

    def __init__(self, module: nn.Module, degrees: Degrees) -> None:
        self.degrees = degrees
        self.experts = {
            p for part in module.modules() if isinstance(part, GroupedExperts) for p in part.parameters()
        }
        self.whole = _whole_factors(module)
        """Factors of adapters that every tensor-parallel rank has whole."""

    def shards(self, part: Collection[Tensor]) -> int:
        return self._share(part, num_shards=self.degrees.fsdp, num_expert_shards=self.degrees.fsdp)

    def gathered(self, part: Collection[Tensor]) -> int:
        # Under expert parallelism a rank gathers its own experts alone.
        return self._share(part, num_shards=1, num_expert_shards=self.degrees.ep)

    def gathered_at_once(self, part: Collection[Tensor], *, among: int = 1) -> Gathered:
        """One of `among` equal parts."""
        return Gathered(
            parameters=self.gathered(part) // among,
            trained=self.gathered([p for p in part if p.requires_grad]) // among,
            # What torchao puts around a weight casts a shard before it is gathered.
            in_float8=self.gathered([p for p in part if hasattr(p, "fsdp_pre_all_gather")]) // among,
        )

    def _share(self, part: Collection[Tensor], *, num_shards: int, num_expert_shards: int) -> int:
        """Experts are split by their own degree of tensor parallelism."""
        tp, etp = self.degrees.tp, self.degrees.etp
        num_experts = sum(p.numel() for p in part if p in self.experts)
        num_whole = sum(p.numel() for p in part if p in self.whole)
        num_rest = sum(p.numel() for p in part) - num_experts - num_whole
        return math.ceil(
            num_rest / (tp * num_shards) + num_whole / num_shards + num_experts / (etp * num_expert_shards)
        )


def _whole_factors(module: nn.Module) -> set[nn.Parameter]:
    by_columns = {
        linear for name, linear in module.named_modules() if name.rpartition(".")[2] in SPLIT_BY_COLUMNS
    }
    return {
        adapter.lora_b if linear in by_columns else adapter.lora_a
        for linear, adapter in adapted_layers(module)
    }
