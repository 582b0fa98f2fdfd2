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

from rl.distributed.compat import find_gpus_with_context
from rl.distributed.process_group import World
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
    """torchstore's controller with async endpoints only: Monarch 0.7 refuses a mix of `def` and
    `async def`.
    """

    get_controller_strategy = _as_async(torchstore.api.Controller.get_controller_strategy)
    locate_volumes = _as_async(torchstore.api.Controller.locate_volumes)
    notify_put = _as_async(torchstore.api.Controller.notify_put)
    keys = _as_async(torchstore.api.Controller.keys)
    notify_delete = _as_async(torchstore.api.Controller.notify_delete)


torchstore.api.Controller = AsyncController

Model = Literal["0.6b", "8b"]
SIZES: Mapping[Model, tuple[int, int, int, int]] = {
    "0.6b": (1024, 2048, 1024, 3072),
    "8b": (4096, 4096, 1024, 12288),
}
"""Width, width of all query heads, width of all key heads, and hidden width of Qwen3's layers."""
HEAD = 128
ROWWISE = ("o_proj", "down_proj")
"""Weights that tensor parallelism splits along their inputs."""


def shapes(num_layers: int, model: Model = "0.6b") -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen3's layers, 11 tensors each; 28 layers of 0.6B are 0.88 GB in
    bfloat16.
    """
    width, heads, kv_heads, hidden = SIZES[model]
    layer: Mapping[str, tuple[int, ...]] = {
        "q_proj": (heads, width),
        "k_proj": (kv_heads, width),
        "v_proj": (kv_heads, width),
        "o_proj": (width, heads),
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
        "input_norm": (width,),
        "post_attention_norm": (width,),
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
    async def setup(self, device_type: str) -> None:
        self._device = (
            torch.device("cpu") if device_type == "cpu" else World.from_env().default_device()
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")

    @endpoint
    async def build(
        self, plan: Plan, num_layers: int, model: Model, dtype: torch.dtype, seed: int
    ) -> int:
        """Create random tensors and return the bytes of all ranks together."""
        torch.manual_seed(seed)
        mesh = (
            None
            if plan == "whole"
            else init_device_mesh(self._device.type, (dist.get_world_size(),))
        )
        for name, shape in shapes(num_layers, model).items():
            tensor = torch.randn(shape).to(self._device, dtype)
            if mesh is not None:
                tensor = distribute_tensor(
                    tensor, mesh, [placement(name, plan)], src_data_rank=None
                )
            self._tensors[name] = tensor
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @endpoint
    async def use_store(self, store: WeightStore) -> None:
        """Keep the store, as a run's actors do: memory that it has mapped stays mapped."""
        self._store = store

    @endpoint
    async def push(self, version: int) -> weights.Shard:
        return await self._store.push(version=version, state_dict=self._tensors)

    @endpoint
    async def pull(self, snapshot: Snapshot) -> tuple[BoxSum, ...]:
        return await self._store.pull(snapshot, state_dict=self._tensors)

    @endpoint
    async def foreign_contexts(self) -> list[int]:
        """Return the GPUs of other ranks on which this process has a context."""
        return [gpu for gpu in find_gpus_with_context() if gpu != self._device.index]

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
        return all(torch.equal(self._tensors[name].cpu(), tensor) for name, tensor in made.items())
