"""Numbers of tokens, from the micro-batches of all ranks back to the samples that they are of.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.distributed.mesh import DataRank
from rl.rollouts.packing import PackedBatch
from rl.types import TrainingSample


class TokenValues:
    """One number for each target of each sample; each rank adds those of its micro-batches."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        places: Sequence[int] | None = None,
        data_rank: DataRank,
        device: torch.device,
        is_alone: bool,
    ) -> None:
        """
        Args:
            samples: all that are packed.
            places: in `samples`, of those whose numbers are wanted; None: all. The device is waited for after
                those micro-batches alone that have some of them.
            is_alone: there are no other ranks. Else `collect` is a collective of all of them on `device`.
        """
        self._data_rank = data_rank
        self._device = device
        self._is_alone = is_alone
        wanted = range(len(samples)) if places is None else places
        self._shapes = [samples[place].mask.shape for place in wanted]
        self._ends = np.cumsum([samples[place].mask.size for place in wanted])
        self._flat = np.zeros(self._ends[-1], dtype=np.float32)
        self._parts = self._split(self._flat)
        self._part_of = {place: number for number, place in enumerate(wanted)}

    def _split(self, flat: np.ndarray) -> list[np.ndarray]:
        parts = np.split(flat, self._ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def add(self, batch: PackedBatch, values_T: Tensor) -> None:
        """Those of one micro-batch, [T] or [T, K] float32 on any device."""
        if not self._data_rank.speaks or self._part_of.keys().isdisjoint(batch.sample_indices):
            return
        for index, values in batch.scatter(values_T.detach().cpu().numpy()).items():
            if (number := self._part_of.get(index)) is not None:
                self._parts[number][:] = values

    def collect(self) -> list[np.ndarray]:
        """One array a wanted sample, in their order, of its mask's shape; entry 0, no target, is 0. On every
        rank."""
        if self._is_alone:
            return self._parts
        # Each token was computed by one data-parallel rank and is 0 on the others.
        summed = torch.from_numpy(self._flat).to(self._device)
        dist.all_reduce(summed)
        return self._split(summed.cpu().numpy())
