"""Pauses between two steps of an engine, in which each rank's caller changes the engine.

A caller (`update_weights`, `sleep` or `wake`) and the engine's loop meet in a `PauseRequest` on
every rank. The order of events of an update to version 8, on two ranks:

    caller, on each rank      loop of rank 0               loop of rank 1
    --------------------      --------------               --------------
    add: asks for 8           steps                        steps
    use_engine: waits         choose_next: 8
                              Lockstep.exchange: 8 ------> Lockstep.exchange: 8
                              wait_for_request             wait_for_request: rank 1's caller of 8
    use_engine: body writes   let_caller_change            let_caller_change
    use_engine: body is over  ... True                     ... True
    use_engine: waits         Lockstep.all_agree: True     Lockstep.all_agree: True
                              VLLMCore.weights_changed     VLLMCore.weights_changed
    use_engine: returns       end                          end

If a body fails or its caller is cancelled, `let_caller_change` returns False there and `all_agree`
on every rank; the other ranks' callers raise GeneratorError. If a loop fails, its callers raise the
loop's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from actors.vllm.requests import GeneratorError
from rl.observability.spans import span


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Time between two steps in which every rank writes weights, adds an adapter, falls asleep or
    wakes.
    """

    version: int | None = None
    """Policy version of the weights that are written."""
    adapter: int | None = None
    """Version of an adapter that is added; running requests go on as they are."""
    is_newest: bool = False
    """Requests that name no adapter, and have not begun, get this one."""
    asleep: bool = False
    """True to sleep; running requests finish first."""

    def __str__(self) -> str:
        if self.version is not None:
            return f"the update of the weights to version {self.version}"
        if self.adapter is not None:
            return f"the load of adapter {self.adapter}"
        return "sleep" if self.asleep else "wake"


class PauseRequest:
    """Meeting of this rank's caller, who asks for a pause, and the engine's loop, which grants it.

    The module's docstring shows the order of the steps.
    """

    def __init__(self, pause: Pause, *, num_bytes: int = 0) -> None:
        """`num_bytes` is the memory that an adapter takes."""
        self.pause = pause
        self.num_bytes = num_bytes
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        """Done when no step runs; cancelled if the caller gave up before."""
        self._changed: asyncio.Future[bool] = loop.create_future()
        """Done when the caller no longer touches the engine; True if its body succeeded."""
        self._ended: asyncio.Future[bool] = loop.create_future()
        """Done when all ranks are; True if all succeeded."""

    @property
    def is_given_up(self) -> bool:
        """True if the caller was cancelled before the pause began."""
        return self._begun.cancelled()

    # The caller's side.

    @asynccontextmanager
    async def use_engine(self) -> AsyncIterator[None]:
        """Run the body while no rank steps; return when all ranks have ended the pause.

        Raises:
            GeneratorError: another rank failed, or the engine's loop did.
        """
        succeeded = False
        try:
            with span("waits for a turn", version=self.pause.version):
                await self._begun
            yield
            succeeded = True
        finally:
            # Also after a failure or a cancellation: all ranks stand still until this rank reports.
            if not self._changed.done():
                self._changed.set_result(succeeded)

        if not await self._ended:
            raise GeneratorError(f"{self.pause} failed on another rank of the generator")

    # The loop's side.

    async def let_caller_change(self) -> bool:
        """Start the caller's body and wait for its end; return whether it succeeded."""
        if self.is_given_up:
            return False
        self._begun.set_result(None)
        return await self._changed

    def end(self, *, everywhere: bool) -> None:
        """Let the caller return if all ranks succeeded, else raise."""
        # A caller that failed or was cancelled does not wait for the other ranks.
        if not self._ended.done():
            self._ended.set_result(everywhere)

    def fail(self, failure: Exception) -> None:
        """Raise `failure` in the caller, where it waits: for the begin or for the end."""
        awaited = self._ended if self._begun.done() else self._begun
        if not awaited.done():
            awaited.set_exception(failure)


class Pauses:
    """The pauses that callers of this rank have asked for and that are not over."""

    def __init__(self, changed: asyncio.Event) -> None:
        """`changed` is set when a pause is asked for."""
        self._changed = changed
        self._requests: list[PauseRequest] = []

    @property
    def bring_weights(self) -> bool:
        return any(request.pause.version is not None for request in self._requests)

    def add(self, pause: Pause, *, num_bytes: int = 0) -> PauseRequest:
        request = PauseRequest(pause, num_bytes=num_bytes)
        self._requests.append(request)
        self._changed.set()
        return request

    def choose_next(self) -> PauseRequest | None:
        """Return the request for the pause that rank 0 begins next, None if there is none."""
        self._requests = [request for request in self._requests if not request.is_given_up]

        # Weights first, as they cannot be written once the engine sleeps.
        for request in self._requests:
            if request.pause.version is not None:
                return request
        return self._requests[0] if self._requests else None

    async def wait_for_request(self, pause: Pause, *, rank: int, timeout_s: float) -> PauseRequest:
        """Wait for this rank's request for the pause that rank 0 decided on, and return it."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    for request in self._requests:
                        if request.pause == pause:
                            return request
                    await self._changed.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {rank}: rank 0 begins {pause}, but this rank was not asked for it within "
                f"{timeout_s:g} s"
            ) from error

    def remove(self, request: PauseRequest) -> None:
        self._requests.remove(request)

    def fail(self, failure: Exception) -> None:
        """Fail every caller."""
        for request in self._requests:
            request.fail(failure)
        self._requests = []
