"""Samples on disk, to look at after a failure or to train on again.

Shape legend: T tokens of all samples, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rl.rollouts.packing import OPTIONAL_LOGPROBS
from rl.training.errors import NonFiniteLossError
from rl.types import TrainingSample

_PER_TOKEN = ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions")


def non_finite(
    what: str, *, policy_version: int, samples: Sequence[TrainingSample], folder: str | None
) -> NonFiniteLossError:
    """The error to raise on every rank, with the samples in `folder`, if any, written by the first."""
    file = None
    if folder is not None:
        file = Path(folder) / f"nan_batch_version_{policy_version}.npz"
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_batch(file, samples)
    return NonFiniteLossError(what, policy_version, None if file is None else str(file))


def write_batch(file: str | Path, samples: Sequence[TrainingSample]) -> None:
    """An npz of each per-token array joined to [T], with `lengths` and `temperatures` [S]."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    there = [name for name in OPTIONAL_LOGPROBS if all(getattr(s, name) is not None for s in samples)]
    names = [*_PER_TOKEN, *there]
    joined = {name: np.concatenate([getattr(s, name) for s in samples]) for name in names}
    np.savez_compressed(
        file,
        allow_pickle=False,
        lengths=np.asarray([len(s.token_ids) for s in samples]),
        temperatures=np.asarray([s.temperature for s in samples]),
        **joined,
    )


def read_batch(file: str | Path) -> list[TrainingSample]:
    """The samples that `write_batch` wrote."""
    with np.load(file, allow_pickle=False) as content:
        ends = np.cumsum(content["lengths"])[:-1]
        names = [name for name in (*_PER_TOKEN, *OPTIONAL_LOGPROBS) if name in content]
        columns = {name: np.split(content[name], ends) for name in names}
        temperatures = content["temperatures"].tolist()
    return [
        TrainingSample(**{name: columns[name][i] for name in names}, temperature=temperature)
        for i, temperature in enumerate(temperatures)
    ]
