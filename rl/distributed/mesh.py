"""The trainer's device mesh: data-parallel replicas x data-parallel shards x context x tensor parallel."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
CP = "cp"
TP = "tp"
FSDP = "fsdp"
"""Shards and context-parallel ranks as one axis."""
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
"""Of the experts' own mesh, see `rl/distributed/expert_parallel.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Sizes of the mesh's axes, all known; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int = 1
    ep: int = 1
    """Ranks among the shards that hold different experts."""
    etp: int = 1
    """Ranks that each expert is split over: 1 or `tp`."""

    @property
    def dp(self) -> int:
        """How many ranks see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that parameters are split over, beside tensor parallelism."""
        return self.dp_shard * self.cp


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the trainer's processes share the model and the samples.

    Replicate, shard, context and tensor parallel degree multiply to the number of processes.
    Neighbouring ranks are one tensor-parallel group, the next axes are the context-parallel
    ranks and then the shards of one replica.
    """

    data_parallel_replicate_degree: int = 1
    """Copies of the (possibly sharded) model; gradients are summed between them. With shard degree 1: DDP."""
    data_parallel_shard_degree: int = -1
    """Ranks that parameters, gradients and optimizer state are split over (FSDP); -1 takes what is left."""
    tensor_parallel_degree: int = 1
    """Ranks that each layer's heads, feed-forward width and vocabulary are split over."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees a block's gathered parameters between forward and backward; default: yes."""
    loss_parallel: bool = True
    """Tensor-parallel ranks compute logprobs and entropy from their own part of the vocabulary; False
    gathers all logits on each of them."""
    async_tensor_parallel: bool = False
    """Overlap tensor parallelism's communication with its matrix products; needs GPUs that read each
    other's memory, and compiled blocks."""
    compiled_autograd: bool = False
    """Compile the backward as a whole; refused."""
    context_parallel_degree: int = 1
    """Ranks that the tokens of each micro-batch are split over, and parameters too, as by shards."""
    context_parallel_rotation: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values reach the queries of other ranks; alltoall is refused."""
    expert_parallel_degree: int = 1
    """Ranks, among those that shard parameters, that each hold other experts; tokens travel to them. A dense
    model has none."""
    expert_tensor_parallel_degree: int = 1
    """Tensor-parallel ranks that each expert is split over. 1: they hold all experts whole, each for its
    own tokens; or tensor_parallel_degree: each holds a part of every expert, for all their tokens."""
    pipeline_parallel_degree: int = 1
    """Stages that the layers are split into; refused, and so are the following fields."""
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = None
    """File that describes a schedule."""
    pipeline_parallel_microbatch_size: int = 1
    pipeline_parallel_layers_per_stage: int | None = None
    module_fqns_per_model_part: tuple[str, ...] | None = None
    """Names of the modules of each stage, with commas between them."""
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_last_stage_less_layers: int = 1

    def __post_init__(self) -> None:
        for name in _DEGREES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        shard = self.data_parallel_shard_degree
        if shard < 1 and shard != -1:
            raise ValueError(
                f"data_parallel_shard_degree={shard}: must be at least 1, or -1 for what is left"
            )
        for name, default in _PIPELINE_DEFAULTS.items():
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {default!r}: {_NO_PIPELINE}")
        if self.compiled_autograd:
            raise ValueError(f"compiled_autograd=True: must be False: {_NO_COMPILED_AUTOGRAD}")
        if self.context_parallel_rotation == "alltoall":
            raise ValueError(f"context_parallel_rotation='alltoall': must be 'allgather': {_NO_ROTATION}")

    def degrees(self, world_size: int) -> Degrees:
        """Fill in the -1.

        Raises:
            ValueError: if the degrees do not multiply to `world_size`.
        """
        self.__post_init__()  # A field may have been edited since.
        replicate, tp = self.data_parallel_replicate_degree, self.tensor_parallel_degree
        shard, cp = self.data_parallel_shard_degree, self.context_parallel_degree
        if shard == -1:
            shard = max(1, world_size // (replicate * cp * tp))
        if replicate * shard * cp * tp != world_size:
            raise ValueError(
                f"parallelism.data_parallel_replicate_degree={replicate} x "
                f"data_parallel_shard_degree={self.data_parallel_shard_degree} x "
                f"context_parallel_degree={cp} x "
                f"tensor_parallel_degree={tp} does not multiply to the world size of {world_size} process"
                f"{'es' if world_size > 1 else ''}"
            )
        self._check_expert_degrees(num_shards=shard * cp)
        return Degrees(
            dp_replicate=replicate,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            ep=self.expert_parallel_degree,
            etp=self.expert_tensor_parallel_degree,
        )

    def _check_expert_degrees(self, *, num_shards: int) -> None:
        """`num_shards`: ranks that parameters are split over, beside tensor parallelism."""
        if num_shards % self.expert_parallel_degree:
            raise ValueError(
                f"parallelism.expert_parallel_degree={self.expert_parallel_degree} does not divide the "
                f"{num_shards} ranks that parameters are sharded over, among which it takes its own"
            )
        if self.expert_tensor_parallel_degree not in (1, self.tensor_parallel_degree):
            raise ValueError(
                f"parallelism.expert_tensor_parallel_degree={self.expert_tensor_parallel_degree}: must be 1 "
                f"or tensor_parallel_degree={self.tensor_parallel_degree}"
            )


_DEGREES = (
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
)
_PIPELINE_DEFAULTS = {
    "pipeline_parallel_degree": 1,
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_schedule_csv": None,
    "pipeline_parallel_microbatch_size": 1,
    "pipeline_parallel_layers_per_stage": None,
    "module_fqns_per_model_part": None,
    "pipeline_parallel_first_stage_less_layers": 1,
    "pipeline_parallel_last_stage_less_layers": 1,
}
_NO_PIPELINE = (
    "pipeline parallelism is not supported, because forward_backward packs samples of any length into "
    "micro-batches whose number changes from call to call, while a pipeline needs a fixed number of equal "
    "shape; split the model with FSDP, tensor and context parallelism"
)
_NO_COMPILED_AUTOGRAD = (
    "it traces the backward of a whole micro-batch whenever its shape is new, which packed ones are in every "
    "call, and does not follow FSDP's hooks: on two ranks gradients come out wrong; compile.enable compiles "
    "each block's backward"
)
_NO_ROTATION = (
    "passing blocks of keys from rank to rank merges partial softmaxes by their log-sum-exp, which the "
    "attention kernels for packed sequences do not return with a gradient"
)


def build_mesh(degrees: Degrees, *, device_type: str, always: bool = False) -> DeviceMesh | None:
    """Axes `dp_replicate`, `dp_shard`, `cp` and `tp`, sizes of 1 included; None for a single process.

    Args:
        always: make one for a single process too, which then has a process group of its own.
    """
    shape = (degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    if shape == (1, 1, 1, 1) and not always:
        return None
    return init_device_mesh(device_type, shape, mesh_dim_names=(DP_REPLICATE, DP_SHARD, CP, TP))


def fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis that parameters are split over: shards and context-parallel ranks together."""
    return mesh[DP_SHARD] if mesh[CP].size() == 1 else mesh[DP_SHARD, CP]._flatten(FSDP)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP2 takes: the axis of `fsdp_axis`, behind an axis of replicas where there are several."""
    shards = fsdp_axis(mesh)
    if mesh[DP_REPLICATE].size() == 1:
        return shards
    with warnings.catch_warnings():
        # Its replacement is not in every version of PyTorch that this runs on.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[DP_REPLICATE, shards.mesh_dim_names[0]]  # type: ignore[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRank:
    """Which share of the samples this process takes, and whether it speaks for its share."""

    index: int = 0
    count: int = 1
    speaks: bool = True
    """True on the first of the context- and tensor-parallel ranks, which all hold the same numbers."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> DataRank:
        if mesh is None:
            return cls()
        replicas, shards = mesh[DP_REPLICATE].size(), mesh[DP_SHARD].size()
        replica, shard = mesh.get_local_rank(DP_REPLICATE), mesh.get_local_rank(DP_SHARD)
        speaks = mesh.get_local_rank(CP) == mesh.get_local_rank(TP) == 0
        return cls(index=replica * shards + shard, count=replicas * shards, speaks=speaks)
