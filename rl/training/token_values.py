"""Token ids that are checked, and numbers of tokens that are collected from all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import DataRank
from rl.rollouts.packing import PackedBatch
from rl.types import TrainingSample


class TokenValues:
    """Numbers for each target of each sample, collected from the micro-batches of all ranks."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        data_rank: DataRank,
        mesh: DeviceMesh | None,
        device: torch.device,
        wanted: Sequence[int] | None = None,
        num_values: int | None = None,
    ) -> None:
        """Make room for the values of the samples at the indices `wanted`, or of all of them.

        Each target has one number, or a last axis of `num_values`.
        """
        self._data_rank = data_rank
        self._mesh = mesh
        self._device = device
        indices = range(len(samples)) if wanted is None else wanted
        further = () if num_values is None else (num_values,)
        self._values = {
            index: np.zeros(samples[index].mask.shape + further, dtype=np.float32)
            for index in indices
        }
        self._added: list[tuple[PackedBatch, Tensor]] = []
        """Micro-batches with their values, on the device: a copy would make the next one wait."""

    def has_wanted(self, batch: PackedBatch) -> bool:
        """Return whether the micro-batch has a wanted sample."""
        return not self._values.keys().isdisjoint(batch.sample_indices)

    def add(self, batch: PackedBatch, values_T: Tensor) -> None:
        """Add the values of one micro-batch, [T] or [T, K] float32, with any last axis."""
        # Ranks that hold the same tokens would add them several times.
        if self._data_rank.speaks and self.has_wanted(batch):
            self._added.append((batch, values_T.detach()))

    def collect(self) -> list[np.ndarray]:
        """Return one array for each wanted sample, on every rank; entry 0 is 0."""
        for batch, values_T in self._added:
            for index, values in batch.scatter(values_T.cpu().numpy()).items():
                if index in self._values:
                    self._values[index][:] = values

        arrays = list(self._values.values())
        if self._mesh is None:
            return arrays
        # One data-parallel rank computed each token; on the others it is 0.
        summed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(
            self._device
        )
        dist.all_reduce(summed)
        parts = np.split(summed.cpu().numpy(), np.cumsum([array.size for array in arrays])[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def select_samples(asked: bool | Sequence[int], *, num_samples: int, name: str) -> Sequence[int]:
    """Return the indices of the samples of which the caller wants more; `name` is the argument."""
    if isinstance(asked, bool):
        return range(num_samples if asked else 0)
    indices = list(asked)
    if any(not 0 <= index < num_samples for index in indices) or len(set(indices)) < len(indices):
        raise ValueError(
            f"{name}={indices}: must be different sample indices from 0 to {num_samples - 1}"
        )
    return indices


def check_token_ids(samples: Sequence[TrainingSample], *, vocab_size: int) -> None:
    """Raise ValueError for an id outside of the vocabulary."""
    for index, sample in enumerate(samples):
        given = {"token_ids": sample.token_ids}
        if sample.targets is not None:
            given["targets"] = sample.targets[1:]
        for name, ids in given.items():
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.size:
                raise ValueError(
                    f"sample {index}: {name} has {outside[0]}: must be token ids of 0 to "
                    f"{vocab_size - 1}"
                )
