"""Errors of the weight store, which cross process boundaries, and kinds of versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl.utils.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    """What a version is that holds an adapter instead of whole weights."""

    lora: Any
    """Settings of the adapter, an `rl.models.lora.LoRA.Config`."""
    base_id: int
    """Checksum of the base's weights in the generators' dtype (`digest_sums`); of a shard, its
    rank's part of it."""


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
