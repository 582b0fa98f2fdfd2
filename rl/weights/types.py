"""Errors of the weight store, which cross process boundaries."""

from __future__ import annotations

from rl.utils.errors import RunError


class WeightStoreError(RunError):
    """Base of the weight store's errors."""


class VersionNotFoundError(WeightStoreError):
    """The version was never announced, or is deleted."""


class VersionExistsError(WeightStoreError):
    """Something of this version is already stored; versions are never overwritten."""


class WeightMismatchError(WeightStoreError):
    """The tensors asked for are not the tensors that were pushed."""


class WeightTimeoutError(WeightStoreError, TimeoutError):
    """A push, pull or other operation did not finish within its deadline."""


class SharedMemoryError(WeightStoreError):
    """There is not enough memory for the versions, or a process may not open it."""


class WeightParityError(WeightStoreError):
    """A generator does not hold the weights that the trainer sent."""
