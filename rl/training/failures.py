"""Errors that stop a run, and the batch that is written for a loss that is not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError

from rl.types import TrainingSample
from rl.utils.errors import RunError

logger = logging.getLogger(__name__)


class NonFiniteLossError(RunError, ArithmeticError):
    """A loss or gradient is NaN or infinite; raised on every rank after the gradient is dropped."""

    def __init__(self, what: str, policy_version: int, batch_file: str | None) -> None:
        """
        Args:
            what: the quantity and its value, such as "loss nan".
            batch_file: npz file with the samples since the last step.
        """
        # All arguments, so that the error can be pickled and sent to the controller.
        super().__init__(what, policy_version, batch_file)
        self.what = what
        self.policy_version = policy_version
        self.batch_file = batch_file

    def message(self) -> str:
        saved = f"; the batch is in {self.batch_file}" if self.batch_file else ""
        return f"{self.what} at policy version {self.policy_version}{saved}"


class CheckpointError(RunError):
    """A checkpoint could not be written or read; earlier checkpoints are unchanged."""


@contextmanager
def wrap_checkpoint_errors(
    what: str, *, kinds: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
) -> Iterator[None]:
    """Raise errors as a CheckpointError that begins with `what`, except that a folder exists."""
    try:
        yield
    except FileExistsError:
        # The caller named a folder that is in use, which is an error of the call and not of a disk.
        raise
    except kinds as error:
        raise CheckpointError(f"{what}: {error}") from error


def raise_if_unwritten(folder: str) -> AbstractContextManager[None]:
    """Raise errors of the disk as a CheckpointError that names the folder."""
    what = f"{folder} was not written, earlier content is unchanged"
    return wrap_checkpoint_errors(what, kinds=(OSError, SafetensorError))


def make_non_finite_error(
    what: str, *, policy_version: int, samples: Sequence[TrainingSample], folder: str | None
) -> NonFiniteLossError:
    """Return the error to raise on every rank; the first rank writes the samples into `folder`."""
    file = None
    if folder is not None:
        file = Path(folder) / f"nan_batch_version_{policy_version}.npz"
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                write_batch(file, samples)
            except OSError as error:
                # The run stops because of the loss, and must not seem to stop because of the disk.
                with suppress(OSError):
                    file.unlink()
                logger.warning("%s was not written: %s", file, error.strerror or error)
                file = None
    return NonFiniteLossError(what, policy_version, None if file is None else str(file))


def write_batch(file: str | Path, samples: Sequence[TrainingSample]) -> None:
    """Write samples as an npz file, one array `<number>.<field>` for each field that is given."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for number, sample in enumerate(samples):
        for f in fields(sample):
            value = getattr(sample, f.name)
            if value is not None:
                arrays[f"{number}.{f.name}"] = value
    np.savez_compressed(file, allow_pickle=False, **arrays)


def read_batch(file: str | Path) -> list[TrainingSample]:
    """Return the samples of `write_batch`, to repeat the step that failed."""
    samples: dict[str, dict[str, Any]] = {}
    with np.load(file, allow_pickle=False) as content:
        for key in content:
            number, _, name = key.partition(".")
            samples.setdefault(number, {})[name] = content[key]
    for sample in samples.values():
        # Numbers are stored as arrays without a dimension.
        for name in ("temperature", "episode"):
            if name in sample:
                sample[name] = sample[name].item()
    return [TrainingSample(**sample) for sample in samples.values()]
