"""What can go wrong with weights on their way; all cross process boundaries with their type."""

from __future__ import annotations

from rl.errors import RunError


class WeightStoreError(RunError):
    """Base of the errors of the weight store."""


class VersionNotFoundError(WeightStoreError):
    """The version was never announced, or is deleted."""


class VersionExistsError(WeightStoreError):
    """Something of this version is already stored; versions are never overwritten."""


class IncompleteVersionError(WeightStoreError):
    """Some rank has not pushed its part of the version."""


class WeightMismatchError(WeightStoreError):
    """The tensors asked for are not those that were pushed."""


class WeightTimeoutError(WeightStoreError, TimeoutError):
    """A push, pull or other operation did not finish within its deadline."""


class SharedMemoryError(WeightStoreError):
    """There is not enough memory for the versions that are kept and the one that is written."""


class StaleSegmentError(WeightStoreError):
    """Shared memory holds another version by now, or is closed."""


class WeightCanaryError(WeightStoreError):
    """A generator does not hold the weights that the trainer sent; names generator, tensor and version."""
