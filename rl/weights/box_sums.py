"""Checksums of what one rank holds, box by box."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl.types import BoxSum
from rl.weights.monarch_compat import TensorSlice
from rl.weights.shards import parts_of
from rl.weights.sums import checksum


def box_sum(name: str, box: TensorSlice, *, dtype: torch.dtype, value: int) -> BoxSum:
    return BoxSum(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        global_shape=tuple(box.global_shape),
        offsets=tuple(box.offsets),
        shape=tuple(box.local_shape),
        value=value,
    )


def sums_of(state_dict: Mapping[str, Tensor]) -> tuple[BoxSum, ...]:
    """Of the tensors, DTensors or plain, as they are now."""
    return tuple(
        box_sum(
            part.name,
            part.box,
            dtype=part.local.dtype,
            value=checksum(part.local, global_shape=part.box.global_shape, offsets=part.box.offsets),
        )
        for part in parts_of(state_dict)
    )
