"""Samples on disk, to look at after a failure or to train on again.

Shape legend: T tokens of all samples, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl.types import TrainingSample

_PER_TOKEN = ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions")


def write_batch(file: str | Path, samples: Sequence[TrainingSample]) -> None:
    """An npz of each per-token array joined to [T], with `lengths` and `temperatures` [S]."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    joined = {name: np.concatenate([getattr(s, name) for s in samples]) for name in _PER_TOKEN}
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
        columns = {name: np.split(content[name], ends) for name in _PER_TOKEN}
        temperatures = content["temperatures"].tolist()
    return [
        TrainingSample(**{name: columns[name][i] for name in _PER_TOKEN}, temperature=temperature)
        for i, temperature in enumerate(temperatures)
    ]
