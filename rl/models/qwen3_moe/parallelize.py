"""The trainer's plan for Qwen3 MoE: the dense model's, and where each expert is.

Three ways to split experts, alone or together:

- FSDP, as any parameter of a block.
- Expert parallelism: among the ranks that shard parameters, groups of neighbours hold different
  experts and send each other tokens. FSDP then splits the experts of a rank over the ranks that
  have the same ones.
- Tensor parallelism. Between the layers each tensor-parallel rank has T / tp tokens. Either it
  keeps them, and all experts; or the layer gathers the tokens, each rank computes its part of
  every expert, and the sums are scattered again. The router's gradient is a sum over the ranks
  both times: of different tokens, or of the parts of each token's result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from rl.distributed.expert_parallel import ExpertExchange
from rl.distributed.mesh import DP_REPLICATE, EXPERT, EXPERT_SHARD, TP, ParallelismConfig
from rl.distributed.sharding import OwnMesh, ShardingOptions, prepare_blocks, shard_data_parallel
from rl.models.converters.low_rank import follow_base_layers
from rl.models.qwen3.model import Qwen3, TransformerBlock
from rl.models.qwen3.parallelize import TOKENS, check_tensor_parallel, shard_tensor_parallel
from rl.models.qwen3_moe.model import GroupedExperts, MoE

EXPERTS = 0
ROWS_OF_EXPERT = 1
COLUMNS_OF_EXPERT = 2


def parallelize_qwen3_moe(model: Qwen3, *, mesh: DeviceMesh | None, config: ShardingOptions) -> Qwen3:
    """Shard `model`, best on the meta device, in place; `mesh` None leaves it as it is.

    Args:
        mesh: axes `dp_replicate`, `dp_shard`, `cp`, `tp`, each of size 1 or more. The number of
            tokens of a forward must be a multiple of the size of `tp`.

    Raises:
        ValueError: if the tensor-parallel degree does not divide the key-value heads or the
            vocabulary, or the expert-parallel degree the experts.
    """
    if mesh is not None and mesh[TP].size() > 1:
        check_tensor_parallel(model.config, mesh[TP].size())
        shard_tensor_parallel(model, mesh[TP])
        follow_base_layers(model)
    layers = [_moe_of(block) for block in model.layers]
    if config.expert_mesh is not None:
        _check_expert_parallel(layers[0].experts.num_experts, config.expert_mesh[EXPERT].size())
    if mesh is not None:
        for layer in layers:
            _place(layer, mesh=mesh, config=config)
    prepare_blocks(model.layers, mesh=mesh, options=config)
    if mesh is not None:
        apart = [] if config.expert_mesh is None else _own_meshes(layers, config.expert_mesh)
        shard_data_parallel(model, blocks=model.layers, mesh=mesh, options=config, apart=apart)
    return model


def check_qwen3_moe_layout(config: Qwen3.Config, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for degrees that a mixture of this size cannot be split by."""
    check_tensor_parallel(config, parallelism.tensor_parallel_degree)
    assert isinstance(config.block.feed_forward, MoE.Config)
    _check_expert_parallel(config.block.feed_forward.num_experts, parallelism.expert_parallel_degree)


def _check_expert_parallel(num_experts: int, degree: int) -> None:
    if num_experts % degree:
        raise ValueError(f"expert_parallel_degree={degree} does not divide num_experts={num_experts}")


def _moe_of(block: nn.Module) -> MoE:
    assert isinstance(block, TransformerBlock)
    assert isinstance(block.feed_forward, MoE)
    return block.feed_forward


def _own_meshes(layers: list[MoE], expert_mesh: DeviceMesh) -> list[OwnMesh]:
    axes = (EXPERT_SHARD,) if expert_mesh[DP_REPLICATE].size() == 1 else (DP_REPLICATE, EXPERT_SHARD)
    return [OwnMesh(module=layer.experts, mesh=expert_mesh[axes]) for layer in layers]


def _place(layer: MoE, *, mesh: DeviceMesh, config: ShardingOptions) -> None:
    """Router and experts as DTensors, wherever their ranks' gradients are to be added up or kept apart."""
    tp, expert_mesh = mesh[TP], config.expert_mesh
    split = config.expert_tensor_parallel and tp.size() > 1
    if tp.size() > 1:
        layer.router.weight = _distributed(layer.router.weight, tp, [Replicate()])
    if split:
        layer.register_forward_pre_hook(_GatherTokens(tp))
        layer.register_forward_hook(_ScatterSums(tp))
    rows, columns = (Shard(ROWS_OF_EXPERT), Shard(COLUMNS_OF_EXPERT)) if split else (Replicate(), Replicate())
    if expert_mesh is not None:
        layer.experts.exchange = ExpertExchange(expert_mesh[EXPERT].get_group())
        axes = expert_mesh[EXPERT] if tp.size() == 1 else expert_mesh[EXPERT, TP]
        _distribute(layer.experts, axes, [Shard(EXPERTS), rows], [Shard(EXPERTS), columns])
    elif tp.size() > 1:
        _distribute(layer.experts, tp, [rows], [columns])


def _distribute(
    experts: GroupedExperts, mesh: DeviceMesh, gate_up: list[Placement], down: list[Placement]
) -> None:
    experts.gate_up_proj = _distributed(experts.gate_up_proj, mesh, gate_up[: mesh.ndim])
    experts.down_proj = _distributed(experts.down_proj, mesh, down[: mesh.ndim])


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placements: list[Placement]) -> nn.Parameter:
    # Every rank holds the same weights or loads its own part: nothing is sent from rank 0.
    sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class _GatherTokens:
    """T / tp tokens to all T; each rank's gradient is of its part of the result, so they are added up."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        split = DTensor.from_local(args[0], self.mesh, [Shard(TOKENS)], run_check=False)
        return (split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),)


class _ScatterSums:
    """Each rank's part of the result for all T tokens to the whole result for its T / tp."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out_TE: Tensor) -> Tensor:
        parts = DTensor.from_local(out_TE, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(TOKENS)]).to_local()
