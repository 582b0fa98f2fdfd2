"""The trainer's device mesh: data-parallel replicas x data-parallel shards x context x tensor parallel."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.config.configurable import check_refused, refused, unless
from rl.config.tree import check_bounds

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
CP = "cp"
TP = "tp"
FSDP = "fsdp"
"""Shards and context-parallel ranks as one axis."""
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
"""Axes of the experts' own mesh, see `rl.distributed.expert_parallel`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Resolved sizes of the mesh's axes; the product of replicas, shards, CP and TP is the world size."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int = 1
    ep: int = 1
    """Number of shard ranks that hold different experts."""
    etp: int = 1
    """Number of ranks that share each expert: 1 or `tp`."""

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp


_NO_PIPELINE = refused(
    "pipeline parallelism is not supported, because forward_backward packs samples of any length into "
    "micro-batches whose number changes from call to call, while a pipeline needs a fixed number of equal "
    "shape; split the model with FSDP, tensor and context parallelism"
)
_NO_COMPILED_AUTOGRAD = refused(
    "it traces the backward of a whole micro-batch whenever its shape is new, which packed ones are in every "
    "call, and does not follow FSDP's hooks: on two ranks gradients come out wrong; compile.enable compiles "
    "each block's backward"
)
_NO_ROTATION = refused(
    "passing blocks of keys from rank to rank merges partial softmaxes by their log-sum-exp, which the "
    "attention kernels for packed sequences do not return with a gradient"
)


def _no_pipeline(default: Any) -> Any:
    return field(default=default, metadata=_NO_PIPELINE)


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Layout of the model and the samples over the trainer's processes.

    Replicate, shard, context-parallel and tensor-parallel degree multiply to the number of processes.
    Neighbouring ranks form a tensor-parallel group; the next axes are the context-parallel ranks and then the
    shards of one replica.
    """

    data_parallel_replicate_degree: int = 1
    """Number of copies of the (possibly sharded) model, whose gradients are summed; DDP with shard degree 1."""
    data_parallel_shard_degree: int = -1
    """Number of ranks that share parameters, gradients and optimizer state (FSDP); -1 takes all remaining
    ranks."""
    tensor_parallel_degree: int = 1
    """Number of ranks that share each layer's heads, feed-forward width and vocabulary."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Policy of FSDP for freeing a block's gathered parameters between forward and backward; default frees
    them."""
    loss_parallel: bool = field(default=True, metadata=unless("tensor_parallel_degree", 1))
    """Compute logprobs and entropy from each tensor-parallel rank's part of the vocabulary; False gathers all
    logits on every rank."""
    async_tensor_parallel: bool = False
    """Overlap tensor parallelism's communication with its matrix products; needs compiled blocks and GPUs that
    read each other's memory."""
    compiled_autograd: bool = field(default=False, metadata=_NO_COMPILED_AUTOGRAD)
    """Compile the backward as a whole; refused."""
    context_parallel_degree: int = 1
    """Number of ranks that share the tokens of each micro-batch, and the parameters as shards do."""
    context_parallel_rotation: Literal["allgather", "alltoall"] = field(
        default="allgather", metadata=_NO_ROTATION
    )
    """Transport of keys and values to the queries of other ranks; alltoall is refused."""
    expert_parallel_degree: int = 1
    """Number of ranks, among those that shard parameters, that hold different experts and exchange tokens; 1 for
    a dense model."""
    expert_tensor_parallel_degree: int = 1
    """Number of tensor-parallel ranks that share each expert. 1: each rank holds all experts for its own tokens;
    tensor_parallel_degree: each rank holds a part of every expert for all tokens."""
    pipeline_parallel_degree: int = _no_pipeline(1)
    """Number of pipeline stages; values above 1 are refused, and so are the following fields."""
    pipeline_parallel_schedule: str = _no_pipeline("1F1B")
    pipeline_parallel_schedule_csv: str | None = _no_pipeline(None)
    """File that describes a pipeline schedule."""
    pipeline_parallel_microbatch_size: int = _no_pipeline(1)
    pipeline_parallel_layers_per_stage: int | None = _no_pipeline(None)
    module_fqns_per_model_part: tuple[str, ...] | None = _no_pipeline(None)
    """Module names of each stage, separated by commas."""
    pipeline_parallel_first_stage_less_layers: int = _no_pipeline(1)
    pipeline_parallel_last_stage_less_layers: int = _no_pipeline(1)

    def __post_init__(self) -> None:
        check_refused(self)
        axes = ("data_parallel_replicate", "tensor_parallel", "context_parallel")
        for axis in (*axes, "expert_parallel", "expert_tensor_parallel"):
            check_bounds(self, f"{axis}_degree", at_least=1)
        shards = self.data_parallel_shard_degree
        if shards < 1 and shards != -1:
            raise ValueError(
                f"data_parallel_shard_degree={shards}: must be at least 1, or -1 for all remaining ranks"
            )

    def degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes for a number of processes; raise ValueError if the degrees do not fit."""
        replicate, tp = self.data_parallel_replicate_degree, self.tensor_parallel_degree
        shard, cp = self.data_parallel_shard_degree, self.context_parallel_degree
        if shard == -1:
            shard = max(1, world_size // (replicate * cp * tp))
        if replicate * shard * cp * tp != world_size:
            raise ValueError(
                f"parallelism.data_parallel_replicate_degree={replicate} x "
                f"data_parallel_shard_degree={self.data_parallel_shard_degree} x "
                f"context_parallel_degree={cp} x "
                f"tensor_parallel_degree={tp} does not multiply to the world size of {world_size}"
            )
        if shard * cp % self.expert_parallel_degree:
            raise ValueError(
                f"parallelism.expert_parallel_degree={self.expert_parallel_degree} does not divide the "
                f"{shard * cp} ranks that parameters are sharded over, among which it takes its own"
            )
        if self.expert_tensor_parallel_degree not in (1, tp):
            raise ValueError(
                f"parallelism.expert_tensor_parallel_degree={self.expert_tensor_parallel_degree}: must be 1 "
                f"or tensor_parallel_degree={tp}"
            )
        ep, etp = self.expert_parallel_degree, self.expert_tensor_parallel_degree
        return Degrees(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp)


def build_mesh(degrees: Degrees, *, device_type: str, always: bool = False) -> DeviceMesh | None:
    """Return the mesh with axes `dp_replicate`, `dp_shard`, `cp`, `tp`; a single process has one only if `always`."""
    shape = (degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    if shape == (1, 1, 1, 1) and not always:
        return None
    return init_device_mesh(device_type, shape, mesh_dim_names=(DP_REPLICATE, DP_SHARD, CP, TP))


def build_expert_mesh(mesh: DeviceMesh | None, *, degree: int) -> DeviceMesh | None:
    """Return a mesh of the same ranks whose shards are cut into the axes `expert_shard` and `expert`.

    `degree` neighbours hold different experts; ranks with the same experts share them as FSDP shards. None if
    `degree` is 1.
    """
    if mesh is None or degree == 1:
        return None
    replicas, tp = mesh[DP_REPLICATE].size(), mesh[TP].size()
    shards = mesh.size() // (replicas * tp)
    assert shards % degree == 0, "checked by Degrees"
    return init_device_mesh(
        mesh.device_type,
        (replicas, shards // degree, degree, tp),
        mesh_dim_names=(DP_REPLICATE, EXPERT_SHARD, EXPERT, TP),
    )


def fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis over which parameters are sharded: shards and context-parallel ranks together."""
    return mesh[DP_SHARD] if mesh[CP].size() == 1 else mesh[DP_SHARD, CP]._flatten(FSDP)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP2: `fsdp_axis`, behind an axis of replicas if there are several."""
    shards = fsdp_axis(mesh)
    if mesh[DP_REPLICATE].size() == 1:
        return shards
    with warnings.catch_warnings():
        # The replacement is missing from some supported versions of PyTorch.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[DP_REPLICATE, shards.mesh_dim_names[0]]  # type: ignore[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRank:
    """This process's share of the samples."""

    index: int = 0
    count: int = 1
    speaks: bool = True
    """True on the first of the context- and tensor-parallel ranks, which all hold the same numbers and of which
    one reports them."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> DataRank:
        if mesh is None:
            return cls()
        replicas, shards = mesh[DP_REPLICATE].size(), mesh[DP_SHARD].size()
        replica, shard = mesh.get_local_rank(DP_REPLICATE), mesh.get_local_rank(DP_SHARD)
        speaks = mesh.get_local_rank(CP) == mesh.get_local_rank(TP) == 0
        return cls(index=replica * shards + shard, count=replicas * shards, speaks=speaks)
