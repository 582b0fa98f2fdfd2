"""Private names of PyTorch that the weight store uses, each with its reason."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


def find_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Return the place of this rank's shard in the whole tensor; DTensor has no public method."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no shard"
    _, offsets = _compute_local_shape_and_global_offset(
        tensor.shape,
        mesh_shape=tensor.device_mesh.shape,
        my_coordinate=list(coordinate),
        placements=tensor.placements,
    )
    return tuple(offsets)
