"""Changes of a running engine, from the side of the callers: weights, adapters, sleep.

All of them happen in pauses between two steps (pauses.py), which the engine's loop grants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from actors.vllm.adapters import AdapterShelf
from actors.vllm.config import GeneratorConfig
from actors.vllm.pauses import Pause, Pauses
from actors.vllm.requests import GeneratorError, Queue
from rl.models.lora import LoRA
from rl.utils.threads import WorkerThread
from rl.weights.types import WeightMismatchError

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore

T = TypeVar("T")


class EngineUpdates:
    """The part of a `GeneratorEngine` that changes what it computes with."""

    config: GeneratorConfig
    base_id: int | None
    _core: VLLMCore
    _thread: WorkerThread | None
    _failure: GeneratorError | None
    _pauses: Pauses
    _queue: Queue
    _shelf: AdapterShelf

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's weights; write to them only inside `update_weights`."""
        return self._core.get_weights()

    async def update_weights(
        self,
        write: Callable[[dict[str, Tensor]], Awaitable[T]],
        *,
        version: int,
        base_id: int | None = None,
    ) -> T:
        """Let `write` overwrite `model_state_dict()` in place with the weights of `version`.

        Call it on every rank. `write` runs in a pause between two steps (pauses.py), with
        `on_update` drain after the running requests have finished; the engine's loop grants it
        (`_run_pause`). Then all ranks agree that they have written (`_end_pause`), and
        `VLLMCore.weights_changed` adapts kernels and cache before the next step. After a failure
        there are no valid weights: running requests fail, and nothing is generated until an update
        succeeds.

        Raises:
            GeneratorError: another rank failed to write, or the engine was closed or has failed.
            Exception: the error of `write`.
        """
        self.base_id = None
        async with self._pause(Pause(version=version)):
            written = await write(self.model_state_dict())
        self.base_id = base_id
        return written

    async def load_adapter(
        self,
        write: Callable[[dict[str, Tensor]], Awaitable[T]],
        *,
        version: int,
        lora: LoRA.Config,
        base_id: int | None,
        is_newest: bool = True,
    ) -> T:
        """Let `write` fill the factors of an adapter, and add it beside the weights.

        Call it on every rank. The factors are written while the engine computes; only then all
        ranks add the adapter between two steps. Requests that run go on with what they have, and
        new ones get it: those that name it, and with `is_newest` those that name none. After a
        failure nothing has changed.

        Raises:
            ValueError: the engine is not sized for such an adapter.
            WeightMismatchError: it was trained beside other weights, or there is none of its name.
            AdapterRoomError: it does not fit beside those that requests use.
            GeneratorError: another rank failed, or the engine was closed or has failed.
        """
        self._check_serving()
        if lora.rank > self.config.max_lora_rank:
            raise ValueError(
                f"adapter {version} has rank {lora.rank}: must be at most "
                f"generator.max_lora_rank={self.config.max_lora_rank}"
            )
        self._check_base(version, base_id)
        assert self._thread is not None
        # Between two steps, because the first adapter of all attaches hooks to the layers.
        adapter = await self._thread.run(self._core.prepare_adapter, lora)
        failure: Exception | None = None
        try:
            written = await write(adapter.tensors)
        except Exception as error:  # noqa: BLE001  (raised in the pause, which all ranks await)
            failure = error
        pause = Pause(adapter=version, is_newest=is_newest)
        async with self._pauses.add(pause, num_bytes=adapter.num_bytes).use_engine():
            if failure is not None:
                raise failure
            self._check_base(version, base_id)  # Weights may have come meanwhile.
            await self._thread.run(self._core.load_adapter, version, adapter)
        return written

    def _check_base(self, version: int, base_id: int | None) -> None:
        if base_id != self.base_id:
            if self.base_id is None:
                raise WeightMismatchError(
                    f"adapter {version} comes before the weights beside which it was trained "
                    f"(checksum {base_id}): version BASE must be pushed and pulled first, whole "
                    "weights"
                )
            raise WeightMismatchError(
                f"adapter {version} was trained beside other weights (checksum {base_id}) than "
                f"those that are served ({self.base_id}): must be of the same base"
            )

    def give_up_adapters(self, versions: Sequence[int]) -> None:
        """Free adapters as soon as no request uses them; unknown ones are ignored."""
        for version in versions:
            self._shelf.give_up(version)
        self._queue.changed.set()

    async def sleep(self) -> None:
        """Give back the memory of weights and key-value cache until `wake`, for a shared device.

        Call it on every rank. Running requests finish first (see `abort`), waiting requests fail.
        After `wake`, a version must be written first. Raises ValueError if `can_sleep` is False.
        """
        if not self.config.can_sleep:
            raise ValueError("generator.can_sleep=False: must be True for a generator that sleeps")
        await self._set_asleep(True)

    async def wake(self) -> None:
        """Take the memory again; call it on every rank."""
        await self._set_asleep(False)

    async def _set_asleep(self, asleep: bool) -> None:
        self._check_serving()
        if self._core.asleep != asleep:
            self.base_id = None
            async with self._pause(Pause(asleep=asleep)):
                assert self._thread is not None
                await self._thread.run(self._core.set_asleep, asleep)
                self._shelf.clear()

    def _pause(self, pause: Pause) -> AbstractAsyncContextManager[None]:
        """Return a context in which no rank steps, and this rank's engine may be changed."""
        self._check_serving()
        if pause.version is not None and self._core.asleep:
            raise GeneratorError(
                f"the generator sleeps: wake must be called before version {pause.version} is taken"
            )
        return self._pauses.add(pause).use_engine()

    def _check_serving(self) -> None:
        if self._failure is not None:
            raise self._failure
