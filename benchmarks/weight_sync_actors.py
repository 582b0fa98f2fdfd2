"""Writer and reader actors of `benchmarks.weight_sync`."""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchstore
import torchstore.api
from monarch.actor import Actor, endpoint
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from rl.types import BoxSum
from rl.weights import store as weights
from rl.weights.store import Snapshot, WeightStore

Plan = Literal["whole", "fsdp", "tp"]


def _as_async(method: Any) -> Any:
    function = inspect.unwrap(method._method)

    @functools.wraps(function)
    async def call(self: torchstore.api.Controller, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return endpoint(call)


class AsyncController(torchstore.api.Controller):
    """torchstore's controller with async endpoints only: Monarch 0.7 refuses a mix of `def` and `async def`."""

    get_controller_strategy = _as_async(torchstore.api.Controller.get_controller_strategy)
    locate_volumes = _as_async(torchstore.api.Controller.locate_volumes)
    notify_put = _as_async(torchstore.api.Controller.notify_put)
    keys = _as_async(torchstore.api.Controller.keys)
    notify_delete = _as_async(torchstore.api.Controller.notify_delete)


torchstore.api.Controller = AsyncController

WIDTH, NUM_HEADS_WIDTH, NUM_KV_WIDTH, HIDDEN, HEAD = 1024, 2048, 1024, 3072, 128
"""Sizes of Qwen3 0.6B."""
ROWWISE = ("o_proj", "down_proj")
"""Weights that tensor parallelism splits along their inputs."""


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen3 0.6B's layers, 11 tensors each; 28 layers are 0.88 GB in bfloat16."""
    layer: Mapping[str, tuple[int, ...]] = {
        "q_proj": (NUM_HEADS_WIDTH, WIDTH),
        "k_proj": (NUM_KV_WIDTH, WIDTH),
        "v_proj": (NUM_KV_WIDTH, WIDTH),
        "o_proj": (WIDTH, NUM_HEADS_WIDTH),
        "gate_proj": (HIDDEN, WIDTH),
        "up_proj": (HIDDEN, WIDTH),
        "down_proj": (WIDTH, HIDDEN),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
        "input_norm": (WIDTH,),
        "post_attention_norm": (WIDTH,),
    }
    return {f"layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}


def placement(name: str, plan: Plan) -> Placement:
    if plan == "fsdp":
        return Shard(0)
    if "norm" in name:
        return Replicate()
    return Shard(1) if name.endswith(ROWWISE) else Shard(0)


class SyncRank(Actor):
    """One rank of the writers or of the readers."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._tensors: dict[str, Tensor] = {}

    @endpoint
    async def setup(self) -> None:
        dist.init_process_group("gloo")

    @endpoint
    async def build(self, plan: Plan, num_layers: int, dtype: torch.dtype, seed: int) -> int:
        """Create random tensors and return the bytes of all ranks together."""
        torch.manual_seed(seed)
        whole = {name: torch.randn(shape).to(dtype) for name, shape in shapes(num_layers).items()}
        if plan != "whole":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole = {
                name: distribute_tensor(tensor, mesh, [placement(name, plan)], src_data_rank=None)
                for name, tensor in whole.items()
            }
        self._tensors = whole
        return sum(tensor.numel() * tensor.element_size() for tensor in whole.values())

    @endpoint
    async def push(self, store: WeightStore, version: int) -> weights.Shard:
        return await store.push(version=version, state_dict=self._tensors)

    @endpoint
    async def pull(self, store: WeightStore, snapshot: Snapshot) -> tuple[BoxSum, ...]:
        return await store.pull(snapshot, state_dict=self._tensors)

    @endpoint
    async def put_by_torchstore(self, store_name: str, version: int) -> None:
        """Put key by key with torchstore's own `put`."""
        for name, tensor in self._tensors.items():
            await torchstore.put(f"v{version}.{name}", tensor, store_name=store_name)

    @endpoint
    async def get_by_torchstore(self, store_name: str, version: int) -> None:
        for name, tensor in self._tensors.items():
            await torchstore.get(f"v{version}.{name}", tensor, store_name=store_name)

    @endpoint
    async def delete_by_torchstore(self, store_name: str, version: int) -> None:
        for name in self._tensors:
            await torchstore.delete(f"v{version}.{name}", store_name=store_name)

    @endpoint
    async def copy_memory(self, repeats: int) -> float:
        """Return the median seconds of copying all tensors within the process."""
        copies = {name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()}
        took: list[float] = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            for name, tensor in self._tensors.items():
                copies[name].copy_(tensor)
            took.append(time.perf_counter() - started)
        return statistics.median(took[1:])

    @endpoint
    async def equals(self, num_layers: int, dtype: torch.dtype, seed: int) -> bool:
        """Return whether the tensors equal the ones that `build` creates, bit for bit."""
        torch.manual_seed(seed)
        made = {name: torch.randn(shape).to(dtype) for name, shape in shapes(num_layers).items()}
        return all(torch.equal(self._tensors[name], tensor) for name, tensor in made.items())
