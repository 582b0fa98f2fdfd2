"""What stops a run because of its numbers, or of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from rl.errors import RunError


class NonFiniteLossError(RunError, ArithmeticError):
    """A loss or gradient was NaN or infinite; raised on every rank alike, after the gradient is dropped."""

    def __init__(self, what: str, policy_version: int, batch_file: str | None) -> None:
        """
        Args:
            what: the quantity and its value.
            policy_version: of the weights that produced it.
            batch_file: npz of the samples since the last step; None if none was written.
        """
        super().__init__(what, policy_version, batch_file)
        self.what = what
        self.policy_version = policy_version
        self.batch_file = batch_file

    def message(self) -> str:
        saved = f"; the batch is in {self.batch_file}" if self.batch_file else ""
        return f"{self.what} at policy version {self.policy_version}{saved}"


class CheckpointError(RunError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


@contextmanager
def unwritten(folder: str) -> Iterator[None]:
    """Errors of the disk as a CheckpointError that names the folder; FileExistsError stays what it is."""
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} was not written, what was there is as it was: {error}") from error
