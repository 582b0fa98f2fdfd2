"""What each rank of the generator's plan for a mixture computes, for `test_parallelize_generator.py`."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rl.distributed.gloo import use_one_worker
from rl.distributed.shards import whole_tensor
from rl.models.attention import SequenceLayout
from rl.models.qwen3.parallelize_generator import generator_head
from rl.models.qwen3_moe.parallelize_generator import parallelize_qwen3_moe_generator
from tests.support.policies import random_model, small_spec

LENGTHS = [5, 1, 3]
"""An odd number of tokens."""


def compute() -> dict[str, object]:
    """Logits before and after sharding, and the parameters."""
    use_one_worker()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = random_model(small_spec(tie=False, experts=True), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = logits(model)
    assert parallelize_qwen3_moe_generator(model, mesh) is model
    after = model.state_dict()
    return {
        "whole": whole,
        "sharded": logits(model),
        "placements": {n: str(p.placements[0]) for n, p in after.items() if isinstance(p, DTensor)},
        "same_values": all(torch.equal(whole_tensor(after[n]), before[n]) for n in before),
        "same_names": list(before) == list(after),
    }


@torch.no_grad()
def logits(model: nn.Module) -> np.ndarray:
    ids = torch.randint(0, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    layout = SequenceLayout.from_lengths(LENGTHS)
    return model(ids, positions=positions, sequences=layout, head=generator_head).numpy()
