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
        self, samples: Sequence[TrainingSample], *, data_rank: DataRank, device: torch.device, is_alone: bool
    ) -> None:
        """`is_alone`: there are no other ranks. Else `collect` is a collective of all of them on `device`."""
        self._data_rank = data_rank
        self._device = device
        self._is_alone = is_alone
        self._shapes = [s.mask.shape for s in samples]
        self._ends = np.cumsum([s.mask.size for s in samples])
        self._flat = np.zeros(self._ends[-1], dtype=np.float32)
        self._parts = self._split(self._flat)

    def _split(self, flat: np.ndarray) -> list[np.ndarray]:
        parts = np.split(flat, self._ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def add(self, batch: PackedBatch, values_T: Tensor) -> None:
        """Those of one micro-batch, [T] or [T, K] float32 on any device."""
        if self._data_rank.speaks:
            for index, values in batch.scatter(values_T.detach().cpu().numpy()).items():
                self._parts[index][:] = values

    def collect(self) -> list[np.ndarray]:
        """One array a sample, in order, of its mask's shape; entry 0, no target, is 0. On every rank."""
        if self._is_alone:
            return self._parts
        # Each token was computed by one data-parallel rank and is 0 on the others.
        summed = torch.from_numpy(self._flat).to(self._device)
        dist.all_reduce(summed)
        return self._split(summed.cpu().numpy())
