"""The generator's plan for Qwen3 MoE: the dense model's, with every expert split over all ranks.

The router is whole on every rank and chooses the same experts there; each rank computes its part
of each expert, and the results are added up once a layer.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.models.qwen3.model import Qwen3, TransformerBlock
from rl.models.qwen3.parallelize_generator import shard_for_generation, sharded
from rl.models.qwen3_moe.model import MoE

ROWS_OF_EXPERT = 1
COLUMNS_OF_EXPERT = 2


def parallelize_qwen3_moe_generator(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard `model`, best on the meta device, in place; as `parallelize_qwen3_generator` does.

    Raises:
        ValueError: if the size of the mesh does not divide the key-value heads or the vocabulary.
    """
    assert isinstance(model, Qwen3)
    if mesh.size() == 1:
        return model
    shard_for_generation(model, mesh)
    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        assert isinstance(block.feed_forward, MoE)
        experts = block.feed_forward.experts
        experts.gate_up_proj = sharded(experts.gate_up_proj, mesh, dim=ROWS_OF_EXPERT)
        experts.down_proj = sharded(experts.down_proj, mesh, dim=COLUMNS_OF_EXPERT)
        block.feed_forward.register_forward_hook(_Sum(mesh.get_group()))
    return model


class _Sum:
    """Adds the ranks' outputs up, in place."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out_TE: Tensor) -> Tensor:
        dist.all_reduce(out_TE, group=self.group)
        return out_TE
