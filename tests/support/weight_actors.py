"""Small models in every parallel layout, and actors that push and pull them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rl.distributed.mesh import Degrees, ParallelismConfig, build_expert_mesh, build_mesh
from rl.distributed.pipeline import Pipeline
from rl.distributed.sharding import ShardingOptions
from rl.distributed.stages import plan_stages
from rl.models import qwen3, qwen3_moe
from rl.models.decoder import find_persistent_buffers, list_module_names, take_part
from rl.models.parallelize import parallelize_decoder, parallelize_decoder_generator
from rl.types import BoxSum
from rl.weights.store import Shard, Snapshot, WeightStore

Model = Literal["uneven", "dense", "experts"]
Layout = Literal["fsdp_tp", "hsdp", "fsdp", "tp", "ddp", "ddp_dtensor", "single", "pp_fsdp"]


class UnevenNet(nn.Module):
    """Model with buffers in which no size divides by 2 more than once, and `gate` leaves ranks
    empty.
    """

    def __init__(self, *, seed: int, num_rows: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_rows, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Parameter(torch.empty(1))
        self.register_buffer("scale", torch.tensor(1.0 + seed / 3))
        self.register_buffer("steps", torch.tensor([seed, 2**40 + seed]))
        _randomize(self, seed=seed)


def is_buffer(name: str) -> bool:
    return name.endswith(("scale", "steps", "load_balance_bias"))


TP_PLAN = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def build(kind: Model, layout: Layout, *, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's state dict, sharded over the processes that call this together."""
    if kind != "uneven":
        return _build_qwen3(layout, seed=seed, dtype=dtype, experts=kind == "experts")
    model = UnevenNet(seed=seed).to(dtype)
    model.scale = model.scale.float()
    if layout == "fsdp_tp":
        mesh = _mesh_2d()
        parallelize_module(model, mesh["tp"], TP_PLAN)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "hsdp":
        fully_shard(model, mesh=_mesh_2d())
    elif layout == "fsdp":
        fully_shard(model, mesh=_pair())
    elif layout == "tp":
        parallelize_module(model, _pair(), TP_PLAN)
    elif layout == "ddp_dtensor":
        pair = _pair()
        return {n: distribute_tensor(v, pair, [Replicate()]) for n, v in model.state_dict().items()}
    return model.state_dict()


def _build_qwen3(
    layout: Layout, *, seed: int, dtype: torch.dtype, experts: bool
) -> dict[str, Tensor]:
    """Return a two-layer Qwen3 under the trainer's plan (fsdp_tp, pp_fsdp), the generator's (tp) or
    none.

    In a mixture's trainer, experts are split over two ranks, and the shards of each over two more.
    """
    spec = (qwen3_moe if experts else qwen3).model_registry("tiny")
    spec.model.num_layers = 2
    model = spec.model.build()
    _randomize(model, seed=seed)
    for bias in find_persistent_buffers(model).values():
        bias.normal_(generator=torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if layout == "fsdp_tp":
        degrees = Degrees(dp_replicate=1, dp_shard=4 if experts else 2, tp=1 if experts else 2)
        mesh = build_mesh(degrees, device_type="cpu")
        options = ShardingOptions(
            expert_mesh=build_expert_mesh(mesh, degree=2) if experts else None
        )
        parallelize_decoder(model, mesh=mesh, config=options)
    elif layout == "pp_fsdp":
        config = ParallelismConfig(pipeline_parallel_degree=2, data_parallel_shard_degree=2)
        mesh = build_mesh(config.resolve_degrees(4), device_type="cpu")
        assert mesh is not None
        plan = plan_stages(config, list_module_names(spec.model))
        pipeline = Pipeline(config, plan, axis=mesh["pp"], device=torch.device("cpu"))
        parallelize_decoder(model, mesh=mesh, config=ShardingOptions(), pipeline=pipeline)
        model = take_part(model, plan.list_modules(pipeline.rank))
    elif layout == "tp":
        parallelize_decoder_generator(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | find_persistent_buffers(model)


@torch.no_grad()
def _randomize(model: nn.Module, *, seed: int) -> None:
    """Randomize the norms too, which are otherwise the same for every seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(generator=generator)


def _mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _pair() -> DeviceMesh:
    """Return the mesh of the neighbours 0 and 1 (or 2 and 3)."""
    if dist.get_world_size() == 2:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return _mesh_2d()["tp"]


class WeightActor(Actor):
    """One rank of a trainer or generator."""

    def __init__(self) -> None:
        self._state_dict: dict[str, Tensor] = {}

    @endpoint
    async def setup(self) -> None:
        dist.init_process_group("gloo")

    @endpoint
    async def build(self, kind: Model, layout: Layout, seed: int, dtype: torch.dtype) -> None:
        self._state_dict = build(kind, layout, seed=seed, dtype=dtype)

    @endpoint
    async def push(self, store: WeightStore, version: int) -> Shard:
        buffers = [name for name in self._state_dict if is_buffer(name)]
        return await store.push(version=version, state_dict=self._state_dict, buffer_names=buffers)

    @endpoint
    async def pull(self, store: WeightStore, snapshot: Snapshot) -> tuple[BoxSum, ...]:
        return await store.pull(snapshot, state_dict=self._state_dict)

    @endpoint
    async def full(self) -> dict[str, Tensor]:
        """Return the whole tensors, gathered from the shards of all ranks."""
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self._state_dict.items()
        }
