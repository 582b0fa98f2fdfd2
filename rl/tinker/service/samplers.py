"""Which weights the backend holds to sample from, and when it may forget them.

Snapshots without a name live as long as their session, at most `samplers_per_model` of one model: the next
closes the oldest. Base models, once open, stay open. Saved weights are opened by the first sample and shared
by all sampling sessions of the same version; above `saved_samplers` of one owner those that nobody samples
from are closed, the one used longest ago first, and opened again with the next sample. Nothing is closed
before its samples have ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rl.tinker.backend import Backend
from rl.tinker.errors import LimitReachedError
from rl.tinker.messages import ModelSettings
from rl.tinker.service.background import Background
from rl.tinker.service.limits import Limits
from rl.tinker.service.storage import Storage, Stored


@dataclass(slots=True, eq=False)
class Sampler:
    """One of the backend's."""

    sampler_id: str
    owner: str | None
    """None of base models, which are everybody's."""
    num_samples: int = 0
    """That are not finished."""
    opening: asyncio.Task[None] | None = None
    """None of snapshots, which are there from the start."""
    closed: str | None = None
    """Why no more samples are taken."""
    closing: asyncio.Task[None] | None = None
    """Of the backend's weights."""


class Samplers:
    def __init__(self, *, backend: Backend, storage: Storage, background: Background, limits: Limits) -> None:
        self._backend = backend
        self._storage = storage
        self._background = background
        self._limits = limits
        self._bases: dict[str, Sampler] = {}
        self._saved: dict[tuple[str, str], Sampler] = {}
        """By owner and folder; the one used longest ago first."""
        self._snapshots: dict[str, list[Sampler]] = {}
        """By model, the oldest first."""
        self._numbers = itertools.count(1)

    async def take_snapshot(self, model_id: str, sampler_id: str, owner: str) -> Sampler:
        """
        Raises:
            LimitReachedError: the backend has no room, and none of the model's snapshots is unused.
        """
        while True:
            try:
                await self._backend.take_snapshot(model_id, sampler_id)
                break
            except LimitReachedError as error:
                if not await self._make_room(model_id, str(error)):
                    raise
        sampler = Sampler(sampler_id=sampler_id, owner=owner)
        snapshots = self._snapshots.setdefault(model_id, [])
        snapshots.append(sampler)
        while len(snapshots) > self._limits.samplers_per_model:
            self.close_snapshot(
                model_id,
                snapshots[0],
                f"a model has at most {self._limits.samplers_per_model} sampling sessions without a name "
                "(limit samplers_per_model); save the weights under a name to keep them",
            )
        return sampler

    async def _make_room(self, model_id: str, why: str) -> bool:
        """Close the model's oldest snapshot that nobody is sampling from; whether there was one."""
        unused = [s for s in self._snapshots.get(model_id, []) if not s.num_samples]
        if not unused:
            return False
        oldest = unused[0]
        self.close_snapshot(model_id, oldest, f"there was no room for a newer snapshot of its model: {why}")
        assert oldest.closing is not None, "nobody samples from it"
        await asyncio.wait([oldest.closing])
        return True

    def close_snapshot(self, model_id: str, sampler: Sampler, why: str) -> None:
        if sampler.closed is None:
            self._snapshots[model_id].remove(sampler)
            if not self._snapshots[model_id]:
                del self._snapshots[model_id]
            self._close(sampler, why)

    def of_base(self, name: str) -> Sampler:
        """It may still be opening, so wait for its `opening`."""
        if (sampler := self._bases.get(name)) is None or _could_not_open(sampler):
            sampler = self._bases[name] = Sampler(sampler_id=f"base-{next(self._numbers)}", owner=None)
            settings = ModelSettings(base_model=name, lora=None)
            self._open(sampler, lambda: self._backend.open_sampler(sampler.sampler_id, settings, None))
        return sampler

    def of_saved(self, stored: Stored, owner: str) -> Sampler:
        """As `of_base`."""
        key = owner, str(stored.folder)
        if (sampler := self._saved.pop(key, None)) is None or _could_not_open(sampler):
            sampler = Sampler(sampler_id=f"saved-{next(self._numbers)}", owner=owner)
            self._open(sampler, lambda: self._open_saved(sampler.sampler_id, stored))
        self._saved[key] = sampler
        return sampler

    def acquire(self, sampler: Sampler) -> None:
        """The backend keeps the weights until `release`."""
        sampler.num_samples += 1
        if sampler.owner is not None:
            self._close_unused(sampler.owner)

    def release(self, sampler: Sampler) -> None:
        sampler.num_samples -= 1
        if not sampler.num_samples and sampler.closed is not None:
            self._forget(sampler)
        elif sampler.owner is not None:
            self._close_unused(sampler.owner)

    def close_saved(self, stored: Stored, owner: str, why: str) -> None:
        """No sampling session is left that samples from it."""
        if (sampler := self._saved.pop((owner, str(stored.folder)), None)) is not None:
            self._close(sampler, why)

    def _open(self, sampler: Sampler, opening: Callable[[], Awaitable[None]]) -> None:
        async def opened() -> None:
            await opening()

        sampler.opening = self._background.start(opened(), f"opening of {sampler.sampler_id}")

    async def _open_saved(self, sampler_id: str, stored: Stored) -> None:
        with self._storage.reading(stored) as folder:
            await self._backend.open_sampler(sampler_id, stored.record.settings, folder)

    def _close_unused(self, owner: str) -> None:
        own = [(key, sampler) for key, sampler in self._saved.items() if key[0] == owner]
        num_above = len(own) - self._limits.saved_samplers
        for key, sampler in [pair for pair in own if not pair[1].num_samples][: max(num_above, 0)]:
            del self._saved[key]
            self._close(sampler, "it was not used for some time")

    def _close(self, sampler: Sampler, why: str) -> None:
        sampler.closed = why
        if not sampler.num_samples:
            self._forget(sampler)

    def _forget(self, sampler: Sampler) -> None:
        async def forget() -> None:
            if sampler.opening is not None:
                await asyncio.wait([sampler.opening])
            if not _could_not_open(sampler):
                await self._backend.close_sampler(sampler.sampler_id)

        sampler.closing = self._background.start(forget(), f"closing of {sampler.sampler_id}")


def _could_not_open(sampler: Sampler) -> bool:
    opening = sampler.opening
    return opening is not None and opening.done() and (opening.cancelled() or opening.exception() is not None)
