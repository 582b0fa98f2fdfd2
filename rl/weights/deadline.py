"""Operations of the weight store with a deadline, whose errors say what was awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.errors import RunError
from rl.observability.activity import doing
from rl.weights.errors import WeightStoreError, WeightTimeoutError
from rl.weights.volumes import current_torch_rank


@dataclass(kw_only=True, slots=True)
class Progress:
    """What an operation is at, for the error of its deadline."""

    waiting_for: str = "the index"


@contextlib.asynccontextmanager
async def operation(
    name: str, *, timeout_s: float, version: int | None = None, num_tensors: int = 0
) -> AsyncIterator[Progress]:
    """Hold the body to the deadline, and give remote errors their own type again.

    Raises:
        WeightTimeoutError: names operation, version, number of tensors, rank and what was awaited.
        WeightStoreError: that of an actor, or one that was lost.
    """
    progress = Progress()
    try:
        with doing(f"waits for the weight store ({name})", version=version):
            async with asyncio.timeout(timeout_s):
                yield progress
    except TimeoutError as error:
        if isinstance(error, RunError):
            raise  # It has a deadline of its own to tell of.
        raise WeightTimeoutError(
            f"{_describe(name, version, num_tensors)} not finished within timeout_s="
            f"{timeout_s:g}: waited for {progress.waiting_for}"
        ) from error
    except ActorError as error:
        if isinstance(error.exception, WeightStoreError):
            raise error.exception from None
        raise
    except SupervisionError as error:
        raise WeightStoreError(
            f"{_describe(name, version, num_tensors)} failed: lost {progress.waiting_for}: {error}"
        ) from error


def _describe(operation: str, version: int | None, num_tensors: int) -> str:
    of_version = "" if version is None else f" of version {version}"
    of_tensors = f" ({num_tensors} tensors)" if num_tensors else ""
    return f"weight store: {operation}{of_version}{of_tensors} on rank {current_torch_rank()}"
