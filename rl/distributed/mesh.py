"""The trainer's device mesh: data-parallel replicas x data-parallel shards x tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
TP = "tp"
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
"""Of the experts' own mesh, see `rl/distributed/expert_parallel.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Sizes of the mesh's axes, all known; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int = 1
    """Ranks among the shards that hold different experts."""
    etp: int = 1
    """Ranks that each expert is split over: 1 or `tp`."""

    @property
    def dp(self) -> int:
        """How many ranks see different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the trainer's processes share the model and the samples.

    The degrees multiply to the number of processes. Neighbouring ranks are one tensor-parallel
    group, the next axis is the shards of one replica.
    """

    data_parallel_replicate_degree: int = 1
    """Copies of the (possibly sharded) model; gradients are summed between them. With shard degree 1: DDP."""
    data_parallel_shard_degree: int = -1
    """Ranks that parameters, gradients and optimizer state are split over (FSDP); -1 takes what is left."""
    tensor_parallel_degree: int = 1
    """Ranks that each layer's heads, feed-forward width and vocabulary are split over."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees a block's gathered parameters between forward and backward; default: yes."""
    expert_parallel_degree: int = 1
    """Ranks, among those that shard parameters, that each hold other experts; tokens travel to them."""
    expert_tensor_parallel_degree: int = 1
    """Tensor-parallel ranks that each expert is split over. 1: they hold all experts whole, each for its
    own tokens; or tensor_parallel_degree: each holds a part of every expert, for all their tokens."""

    def __post_init__(self) -> None:
        for name in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "expert_parallel_degree",
            "expert_tensor_parallel_degree",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        shard = self.data_parallel_shard_degree
        if shard < 1 and shard != -1:
            raise ValueError(
                f"data_parallel_shard_degree={shard}: must be at least 1, or -1 for what is left"
            )

    def degrees(self, world_size: int) -> Degrees:
        """Fill in the -1.

        Raises:
            ValueError: if the degrees do not multiply to `world_size`.
        """
        self.__post_init__()  # A field may have been edited since.
        replicate, tp = self.data_parallel_replicate_degree, self.tensor_parallel_degree
        shard = self.data_parallel_shard_degree
        if shard == -1:
            shard = max(1, world_size // (replicate * tp))
        if replicate * shard * tp != world_size:
            raise ValueError(
                f"parallelism.data_parallel_replicate_degree={replicate} x "
                f"data_parallel_shard_degree={self.data_parallel_shard_degree} x "
                f"tensor_parallel_degree={tp} does not multiply to the world size of {world_size} process"
                f"{'es' if world_size > 1 else ''}"
            )
        self._check_expert_degrees(num_shards=shard)
        return Degrees(
            dp_replicate=replicate,
            dp_shard=shard,
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


def build_mesh(degrees: Degrees, *, device_type: str) -> DeviceMesh | None:
    """Axes `dp_replicate`, `dp_shard` and `tp`, sizes of 1 included; None for a single process."""
    shape = (degrees.dp_replicate, degrees.dp_shard, degrees.tp)
    if shape == (1, 1, 1):
        return None
    return init_device_mesh(device_type, shape, mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRank:
    """Which share of the samples this process takes, and whether it speaks for its share."""

    index: int = 0
    count: int = 1
    speaks: bool = True
    """True on the first of the tensor-parallel ranks, which all hold the same numbers."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> DataRank:
        if mesh is None:
            return cls()
        replicas, shards = mesh.size(0), mesh.size(1)
        replica, shard, tp_rank = (mesh.get_local_rank(axis) for axis in (DP_REPLICATE, DP_SHARD, TP))
        return cls(index=replica * shards + shard, count=replicas * shards, speaks=tp_rank == 0)
