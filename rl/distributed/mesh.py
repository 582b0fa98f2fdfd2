"""The trainer's device mesh, with an axis for each kind of parallelism.

pipeline stages x data-parallel replicas x shards x context parallel x tensor parallel
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.config.configurable import check_refused, refused, unless
from rl.config.tree import check_bounds
from rl.distributed.compat import flatten_axes

PP = "pp"
"""Ranks that hold different layers; only part of a mesh with several."""
DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
CP = "cp"
TP = "tp"
FSDP = "fsdp"
"""Shards and context-parallel ranks as one axis."""
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
"""Axes of the experts' own mesh, see `rl.distributed.expert_parallel`."""
OF_STAGE = (DP_REPLICATE, DP_SHARD, CP, TP)
"""Axes of the ranks that hold the same layers."""
STAGE = "stage"
"""These axes as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Sizes of the mesh's axes; replicas x shards x CP x TP x PP is the world size.

    Example:
        8 ranks as 2 shards of 4 tensor-parallel ranks: Degrees(dp_replicate=1, dp_shard=2, tp=4).
    """

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int = 1
    ep: int = 1
    """Number of shard ranks that hold different experts."""
    etp: int = 1
    """Number of ranks that share each expert: 1 or `tp`."""
    pp: int = 1

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp


_NO_COMPILED_AUTOGRAD = refused(
    "it traces the backward of a whole micro-batch whenever its shape is new, which packed ones "
    "are in every call, and does not follow FSDP's hooks: on two ranks gradients come out wrong; "
    "compile.enable compiles each block's backward"
)
_IN_PIPELINE = unless("pipeline_parallel_degree", 1)


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Layout of the model and the samples over the trainer's processes.

    Pipeline, replicate, shard, context-parallel and tensor-parallel degree multiply to the number
    of processes. Neighbouring ranks form a tensor-parallel group; the next axes are the
    context-parallel ranks, the shards of one replica, the replicas, and the pipeline's ranks.
    """

    data_parallel_replicate_degree: int = 1
    """Number of copies of the (possibly sharded) model, whose gradients are summed; DDP with shard
    degree 1.
    """
    data_parallel_shard_degree: int = -1
    """Number of ranks that share parameters, gradients and optimizer state (FSDP); -1 takes all
    remaining ranks."""
    tensor_parallel_degree: int = 1
    """Number of ranks that share each layer's heads, feed-forward width and vocabulary."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Policy of FSDP for freeing a block's gathered parameters between forward and backward;
    default frees them, except under pipeline parallelism."""
    loss_parallel: bool = field(default=True, metadata=unless("tensor_parallel_degree", 1))
    """Compute logprobs and entropy from each tensor-parallel rank's part of the vocabulary; False
    gathers all logits on every rank."""
    async_tensor_parallel: bool = False
    """Overlap tensor parallelism's communication with its matrix products; needs compiled blocks
    and GPUs that read each other's memory."""
    compiled_autograd: bool = field(default=False, metadata=_NO_COMPILED_AUTOGRAD)
    """Compile the backward as a whole; refused."""
    context_parallel_degree: int = 1
    """Number of ranks that share the tokens of each micro-batch, and the parameters as shards do.
    """
    context_parallel_rotation: Literal["allgather", "alltoall"] = field(
        default="allgather", metadata=unless("context_parallel_degree", 1)
    )
    """Exchange around attention. allgather: each rank gets all keys and values. alltoall: each rank
    gets all tokens of its share of the heads, whose number must be a multiple of the ranks."""
    expert_parallel_degree: int = 1
    """Number of ranks, among those that shard parameters, that hold different experts and exchange
    tokens; 1 for a dense model."""
    expert_tensor_parallel_degree: int = 1
    """Number of tensor-parallel ranks that share each expert. 1: each rank holds all experts for
    its own tokens; tensor_parallel_degree: each rank holds a part of every expert for all
    tokens."""
    pipeline_parallel_degree: int = 1
    """Number of ranks among which the layers are divided; each passes its results on to the next.
    """
    pipeline_parallel_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"] = (
        field(default="1F1B", metadata=_IN_PIPELINE)
    )
    """Order of the micro-batches' forwards and backwards. Interleaved1F1B and ZBVZeroBubble give
    each rank several stages."""
    pipeline_parallel_schedule_csv: str | None = field(default=None, metadata=_IN_PIPELINE)
    """File with an order of its own, in PyTorch's format: a row for each rank, entries such as 0F2
    for the forward (F), backward (B), backward of inputs (I) or of weights (W) of stage 0 on
    micro-batch 2."""
    pipeline_parallel_microbatch_size: int | None = field(default=None, metadata=_IN_PIPELINE)
    """Most samples of a micro-batch, besides training.max_tokens_per_microbatch; None: no limit."""
    pipeline_parallel_layers_per_stage: int | None = field(default=None, metadata=_IN_PIPELINE)
    """Layers of a stage; None: two stages on each rank with Interleaved1F1B and ZBVZeroBubble, else
    one.
    """
    module_fqns_per_model_part: tuple[str, ...] | None = field(default=None, metadata=_IN_PIPELINE)
    """Module names of each stage, separated by commas: ("embed_tokens,layers.0",
    "layers.1,norm,lm_head").
    """
    pipeline_parallel_first_stage_less_layers: int = field(default=1, metadata=_IN_PIPELINE)
    """Layers that the first stage has less than the others, as it has the embedding."""
    pipeline_parallel_last_stage_less_layers: int = field(default=1, metadata=_IN_PIPELINE)
    """Layers that the last stage has less than the others, as it has the output head and the loss.
    """

    def __post_init__(self) -> None:
        check_refused(self)
        axes = (
            "data_parallel_replicate",
            "tensor_parallel",
            "context_parallel",
            "pipeline_parallel",
        )
        for axis in (*axes, "expert_parallel", "expert_tensor_parallel"):
            check_bounds(self, f"{axis}_degree", at_least=1)
        shards = self.data_parallel_shard_degree
        if shards < 1 and shards != -1:
            raise ValueError(
                f"data_parallel_shard_degree={shards}: must be at least 1, or -1 for all remaining "
                "ranks"
            )
        for name in ("microbatch_size", "layers_per_stage"):
            if getattr(self, f"pipeline_parallel_{name}") is not None:
                check_bounds(self, f"pipeline_parallel_{name}", at_least=1)
        for end in ("first", "last"):
            check_bounds(self, f"pipeline_parallel_{end}_stage_less_layers", at_least=0)

    @property
    def exchanges_heads(self) -> bool:
        """True if context-parallel ranks exchange tokens for heads."""
        return self.context_parallel_degree > 1 and self.context_parallel_rotation == "alltoall"

    def resolve_degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes for a number of processes, or raise ValueError."""
        replicate, tp = self.data_parallel_replicate_degree, self.tensor_parallel_degree
        shard, cp = self.data_parallel_shard_degree, self.context_parallel_degree
        pp = self.pipeline_parallel_degree
        if shard == -1:
            shard = max(1, world_size // (pp * replicate * cp * tp))
        if pp * replicate * shard * cp * tp != world_size:
            of_pipeline = f"pipeline_parallel_degree={pp} x " if pp > 1 else ""
            raise ValueError(
                f"parallelism.{of_pipeline}data_parallel_replicate_degree={replicate} x "
                f"data_parallel_shard_degree={self.data_parallel_shard_degree} x "
                f"context_parallel_degree={cp} x "
                f"tensor_parallel_degree={tp} does not multiply to the world size of {world_size}"
            )

        # Experts live on the ranks over which parameters are sharded, context-parallel ones too.
        if shard * cp % self.expert_parallel_degree:
            raise ValueError(
                f"parallelism.expert_parallel_degree={self.expert_parallel_degree} does not divide "
                f"the {shard * cp} ranks that parameters are sharded over, among which it takes "
                "its own"
            )
        if self.expert_tensor_parallel_degree not in (1, tp):
            raise ValueError(
                f"parallelism.expert_tensor_parallel_degree={self.expert_tensor_parallel_degree}: "
                f"must be 1 or tensor_parallel_degree={tp}"
            )
        ep, etp = self.expert_parallel_degree, self.expert_tensor_parallel_degree
        return Degrees(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp, pp=pp)


def build_mesh(degrees: Degrees, *, device_type: str, always: bool = False) -> DeviceMesh | None:
    """Return the mesh with the axes of `OF_STAGE`, behind `pp` if there are several stages.

    A single process has a mesh only if `always`.
    """
    # Tensor-parallel ranks are neighbours, as they talk most and should share a machine; the
    # pipeline's talk least.
    shape: tuple[int, ...] = (degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    names: tuple[str, ...] = OF_STAGE
    if degrees.pp > 1:
        shape, names = (degrees.pp, *shape), (PP, *names)
    if math.prod(shape) == 1 and not always:
        return None
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def get_pipeline_axis(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the axis of the ranks with different layers; None without pipeline parallelism."""
    return mesh[PP] if mesh is not None and PP in (mesh.mesh_dim_names or ()) else None


def get_stage_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """Return the group of the ranks that hold the same layers; None without a pipeline."""
    if mesh is None or get_pipeline_axis(mesh) is None:
        return None
    return flatten_axes(mesh[OF_STAGE], STAGE).get_group()


def count_ranks_of_stage(mesh: DeviceMesh | None) -> int:
    """Return the number of ranks that hold the same layers."""
    pipeline = get_pipeline_axis(mesh)
    return 1 if mesh is None else mesh.size() // (1 if pipeline is None else pipeline.size())


def build_expert_mesh(mesh: DeviceMesh | None, *, degree: int) -> DeviceMesh | None:
    """Return a mesh of the same ranks, whose shards are cut into `expert_shard` and `expert`.

    `degree` neighbours hold different experts; ranks with the same experts share them as FSDP
    shards. None if `degree` is 1.
    """
    if mesh is None or degree == 1:
        return None
    replicas, tp = mesh[DP_REPLICATE].size(), mesh[TP].size()
    shards = count_ranks_of_stage(mesh) // (replicas * tp)
    assert shards % degree == 0, "checked by Degrees"
    names = (DP_REPLICATE, EXPERT_SHARD, EXPERT, TP)
    num_stages = mesh.size() // count_ranks_of_stage(mesh)
    # Of all stages' ranks: every rank has to take part in making a group, also of others.
    of_all = init_device_mesh(
        mesh.device_type,
        (num_stages, replicas, shards // degree, degree, tp),
        mesh_dim_names=(PP, *names),
    )
    return of_all[names]


def get_fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis over which parameters are sharded: shards and context-parallel ranks."""
    # A context-parallel rank has the same parameters and other tokens, as a shard has.
    return mesh[DP_SHARD] if mesh[CP].size() == 1 else flatten_axes(mesh[DP_SHARD, CP], FSDP)


def get_data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP2: shards, behind an axis of replicas if there are several."""
    shards = get_fsdp_axis(mesh)
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
    """True on the first of the context- and tensor-parallel ranks, which all hold the same numbers
    and of which one reports them."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> DataRank:
        if mesh is None:
            return cls()
        replicas, shards = mesh[DP_REPLICATE].size(), mesh[DP_SHARD].size()
        replica, shard = mesh.get_local_rank(DP_REPLICATE), mesh.get_local_rank(DP_SHARD)
        speaks = mesh.get_local_rank(CP) == mesh.get_local_rank(TP) == 0
        return cls(index=replica * shards + shard, count=replicas * shards, speaks=speaks)
