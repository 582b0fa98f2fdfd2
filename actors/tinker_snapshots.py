"""Snapshots in the weight store: made by the trainer of its models, or of ones made for this alone.

Everything here but `forget` is called within the trainer's turns (`actors.tinker_calls`).
"""

from __future__ import annotations

import itertools
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actors.tinker_calls import TrainerCalls
from actors.tinker_samplers import Snapshot
from rl.tinker.errors import InvalidRequestError, LimitReachedError, TinkerError
from rl.tinker.messages import ModelSettings
from rl.weights.errors import SharedMemoryError, WeightStoreError
from rl.weights.store import WeightStore


class SnapshotMaker:
    def __init__(self, *, trainer: TrainerCalls, store: WeightStore) -> None:
        self._trainer = trainer
        self._store = store
        self._most = store.config.keep_versions
        self._num_there = 0
        self._of_base: Snapshot | None = None
        self._numbers = itertools.count(1)

    async def of_model(self, model_id: str) -> Snapshot:
        """Its weights as they are now.

        Raises:
            InvalidRequestError: nothing could be sampled from them.
            LimitReachedError: there are as many snapshots as may be, or no memory for one more.
        """
        if self._num_there >= self._most:
            raise LimitReachedError(
                f"there are {self._num_there} snapshots in memory, which is the limit "
                "(weights.keep_versions): end a session that has some, or save the weights"
            )
        version = next(self._numbers)
        try:
            sums = await self._trainer.call("push_model", model_id, version, limit="train_s + sync_s")
            await self._store.announce(version)
        except (TinkerError, WeightStoreError) as error:
            with suppress(WeightStoreError):
                await self._store.delete(version)
            if isinstance(error, SharedMemoryError):
                raise LimitReachedError(f"there is no room for another snapshot: {error}") from error
            raise
        self._num_there += 1
        return Snapshot(version=version, sums=tuple(itertools.chain.from_iterable(sums)))

    async def of_base(self, base_model: str) -> Snapshot:
        """The same for all who sample from it; it stays."""
        if self._of_base is None:
            self._of_base = await self._of_new(ModelSettings(base_model=base_model, lora=None), folder=None)
        return self._of_base

    async def of_saved(self, settings: ModelSettings, folder: Path) -> Snapshot:
        """Raises as `of_model`, and InvalidRequestError for a folder that is damaged or does not fit."""
        return await self._of_new(settings, folder=folder)

    async def forget(self, snapshot: Snapshot) -> None:
        """That nobody uses."""
        if snapshot is not self._of_base:
            self._num_there -= 1
            await self._store.delete(snapshot.version)

    async def _of_new(self, settings: ModelSettings, *, folder: Path | None) -> Snapshot:
        model_id = f"sampler {next(self._numbers)}"
        await create_model(self._trainer, model_id, settings)
        try:
            if folder is not None:
                await self._trainer.call("load_state", model_id, folder, False, limit="checkpoint_s")
            return await self.of_model(model_id)
        finally:
            await self._trainer.call("delete_model", model_id, limit="train_s")


async def create_model(trainer: TrainerCalls, model_id: str, settings: ModelSettings) -> None:
    """On all ranks, or none."""
    if settings.lora is not None and settings.lora.seed is None:
        # The same on all ranks.
        settings = replace(settings, lora=replace(settings.lora, seed=secrets.randbits(62)))
    try:
        await trainer.call("create_model", model_id, settings, limit="setup_s")
    except InvalidRequestError:
        await trainer.call("delete_model", model_id, limit="train_s")
        raise
