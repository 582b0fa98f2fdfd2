"""Which process of which role runs on which host and device."""

from __future__ import annotations

from collections.abc import Sequence

from actors.explain.explanation import RankPlace, RolePlace
from actors.fleet import place_fleet
from actors.fleet_config import FleetConfig
from actors.placement import Place
from rl.distributed.mesh import Degrees


def role_places(fleet: FleetConfig, *, degrees: Degrees, num_gpus: int) -> tuple[RolePlace, ...]:
    """Of trainer, generators and reward processes, in this order; `num_gpus` of the controller's machine.

    Raises:
        ValueError: as `place_fleet`.
    """
    placement = place_fleet(fleet, num_gpus=num_gpus)
    tensor_parallel = fleet.generator.tensor_parallel_degree
    return (
        _role(placement.trainer, shape=_trainer_shape(degrees), groups=_trainer_groups(degrees)),
        *(
            _role(
                place,
                shape=f"tensor parallel {tensor_parallel}" if tensor_parallel > 1 else "",
                groups=[""] * place.num_procs,
            )
            for place in placement.generators
        ),
        _role(placement.reward, shape="", groups=[""] * placement.reward.num_procs),
    )


def _role(place: Place, *, shape: str, groups: Sequence[str]) -> RolePlace:
    per_host = place.procs_per_host
    return RolePlace(
        role=place.role,
        hosts=place.hosts,
        num_hosts=place.num_hosts,
        threads=place.threads,
        shape=shape,
        ranks=tuple(
            RankPlace(
                rank=rank,
                host=rank // per_host,
                gpu=None if place.gpus is None else place.gpus[rank % per_host],
                group=groups[rank],
            )
            for rank in range(place.num_procs)
        ),
    )


def _trainer_shape(degrees: Degrees) -> str:
    axes = (
        ("replicas", degrees.dp_replicate),
        ("shards", degrees.dp_shard),
        ("context parallel", degrees.cp),
        ("tensor parallel", degrees.tp),
    )
    said = " x ".join(f"{size} {name}" for name, size in axes if size > 1)
    if degrees.ep > 1:
        said += f", experts over groups of {degrees.ep}"
    if degrees.etp > 1:
        said += f", each expert over {degrees.etp}"
    return said


def _trainer_groups(degrees: Degrees) -> list[str]:
    """Of each rank: tensor-parallel ranks are neighbours, then context-parallel ones, shards, replicas. Ranks
    that share the tokens of a sample are one group; where none do, those of a replica are."""
    inner = degrees.cp * degrees.tp
    groups = []
    for rank in range(degrees.dp_replicate * degrees.dp_shard * inner):
        replica, rest = divmod(rank, degrees.dp_shard * inner)
        said = [f"replica {replica}"] * (degrees.dp_replicate > 1)
        said += [f"shard {rest // inner}"] * (degrees.dp_shard > 1 and inner > 1)
        groups.append(", ".join(said))
    return groups
