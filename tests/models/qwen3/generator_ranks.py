"""What each rank of the generator's plan computes, for `test_parallelize_generator.py`."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rl.distributed.gloo import use_one_worker
from rl.distributed.shards import whole_tensor
from rl.models.attention import SequenceLayout
from rl.models.qwen3.parallelize_generator import generator_head, parallelize_qwen3_generator
from tests.support.policies import random_model, small_spec

LENGTHS = [5, 1, 3]
"""An odd number of tokens."""


def compute() -> dict[bool, dict[str, object]]:
    """By tied embeddings or not: logits before and after sharding, and the parameters."""
    use_one_worker()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results: dict[bool, dict[str, object]] = {}
    for tie in (True, False):
        model = random_model(small_spec(tie=tie), seed=0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        whole = logits(model)
        assert parallelize_qwen3_generator(model, mesh) is model
        after = dict(model.named_parameters())
        results[tie] = {
            "whole": whole,
            "sharded": logits(model),
            "placements": {n: str(p.placements[0]) for n, p in after.items() if isinstance(p, DTensor)},
            "local_elements": {n: p.to_local().numel() for n, p in after.items() if isinstance(p, DTensor)},
            "same_names": list(before) == list(after),
            "same_values": all(torch.equal(whole_tensor(p), before[n]) for n, p in after.items()),
        }
    dist.destroy_process_group()
    return results


@torch.no_grad()
def logits(model: torch.nn.Module) -> np.ndarray:
    ids = torch.randint(0, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    layout = SequenceLayout.from_lengths(LENGTHS)
    return model(ids, positions=positions, sequences=layout, head=generator_head).numpy()
