"""Samples on disk, to look at after a failure or to train on again.

Shape legend: T tokens of all samples, K targets of each, S samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rl.rollouts.packing import OPTIONAL
from rl.training.errors import NonFiniteLossError
from rl.types import TrainingSample

logger = logging.getLogger(__name__)

_PER_TOKEN = ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions")
_NOT_PER_TARGET = ("token_ids", "policy_versions", "ratio_mask")


def non_finite(
    what: str, *, policy_version: int, samples: Sequence[TrainingSample], folder: str | None
) -> NonFiniteLossError:
    """The error to raise on every rank, with the samples in `folder`, if any, written by the first."""
    file = None
    if folder is not None:
        file = Path(folder) / f"nan_batch_version_{policy_version}.npz"
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                write_batch(file, samples)
            except OSError as error:  # the number is what the run stops for
                with suppress(OSError):
                    file.unlink()
                logger.warning("%s was not written: %s", file, error.strerror or error)
                file = None
    return NonFiniteLossError(what, policy_version, None if file is None else str(file))


def write_batch(file: str | Path, samples: Sequence[TrainingSample]) -> None:
    """An npz of each per-token array joined to [T], with `lengths` and `temperatures` [S].

    Arrays [T, K] are there row by row, and `num_targets` [S] is K, or 0 for [T]: calls of one step may differ
    in it.
    """
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    if any(s.targets is not None for s in samples):
        samples = [s if s.targets is not None else replace(s, targets=s.token_ids) for s in samples]
    there = [name for name in OPTIONAL if all(getattr(s, name) is not None for s in samples)]
    names = [*_PER_TOKEN, *there]
    joined = {name: np.concatenate([getattr(s, name).ravel() for s in samples]) for name in names}
    np.savez_compressed(
        file,
        allow_pickle=False,
        lengths=np.asarray([len(s.token_ids) for s in samples]),
        temperatures=np.asarray([s.temperature for s in samples]),
        num_targets=np.asarray([0 if s.mask.ndim == 1 else s.mask.shape[1] for s in samples]),
        **joined,
    )


def read_batch(file: str | Path) -> list[TrainingSample]:
    """The samples that `write_batch` wrote."""
    with np.load(file, allow_pickle=False) as content:
        lengths = content["lengths"]
        num_targets = content.get("num_targets", np.zeros_like(lengths))
        columns: dict[str, list[np.ndarray]] = {}
        for name in (*_PER_TOKEN, *OPTIONAL):
            if name in content:
                width_S = np.zeros_like(lengths) if name in _NOT_PER_TARGET else num_targets
                flat_S = np.split(content[name], np.cumsum(lengths * np.maximum(1, width_S))[:-1])
                columns[name] = [
                    flat.reshape(-1, width) if width else flat
                    for flat, width in zip(flat_S, width_S.tolist(), strict=True)
                ]
        temperatures = content["temperatures"].tolist()
    return [
        TrainingSample(**{name: column[i] for name, column in columns.items()}, temperature=temperature)
        for i, temperature in enumerate(temperatures)
    ]
