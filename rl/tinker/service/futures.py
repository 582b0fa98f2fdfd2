"""Requests from when they are taken on until their results are no longer kept."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from rl.tinker.errors import BusyError, GoneError, InvalidRequestError, TinkerError
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Failure, Response
from rl.tinker.service.sizes import result_bytes

log = logging.getLogger(__name__)

_CLOSED = "the service is closing"


@dataclass(slots=True, eq=False)
class Request:
    """Something that was taken on."""

    request_id: str
    owner: str
    model_id: str | None
    """None of samples."""
    num_bytes: int
    """It holds while it waits."""
    result: Response | Failure | None = None
    result_bytes: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """Of those that can be cancelled alone."""
    forgetting: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """One owner's."""

    num_waiting: int = 0
    waiting_bytes: int = 0
    waiting_by_model: Counter[str | None] = field(default_factory=Counter)
    results: dict[str, Request] = field(default_factory=dict)
    """Those that nobody retrieved yet, the oldest first."""
    retrieved: dict[str, Request] = field(default_factory=dict)
    result_bytes: int = 0


class Futures:
    """What ids lead to. That an id is its owner's is checked before (names.py)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self._held: dict[str, _Held] = {}
        self._closed = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def begin(
        self,
        request_id: str,
        *,
        owner: str,
        model_id: str | None = None,
        num_bytes: int = 0,
        unblocks: bool = False,
    ) -> Request:
        """Take a request on.

        One that `unblocks` others passes the limits on their number: refused, it would keep the room that it
        needs from becoming free.

        Raises:
            BusyError: one of `limits.waiting*`.
        """
        if self._closed:
            raise GoneError(_CLOSED)
        held = self._held.setdefault(owner, _Held())
        if not unblocks:
            self._check_room(held, model_id, num_bytes)
        request = Request(request_id=request_id, owner=owner, model_id=model_id, num_bytes=num_bytes)
        self._requests[request_id] = request
        held.num_waiting += 1
        held.waiting_bytes += num_bytes
        held.waiting_by_model[model_id] += model_id is not None
        return request

    def _check_room(self, held: _Held, model_id: str | None, num_bytes: int) -> None:
        limits = self._limits
        for name, value, limit in (
            ("waiting", held.num_waiting + 1, limits.waiting),
            (
                "waiting_per_model",
                held.waiting_by_model[model_id] + (model_id is not None),
                limits.waiting_per_model,
            ),
            ("waiting_bytes", held.waiting_bytes + num_bytes, limits.waiting_bytes),
        ):
            # One that is larger than the limit by itself has to be let through some time.
            if value > limit and held.num_waiting:
                raise BusyError(f"limit {name}: with this request it would be {value}, above {limit}; wait")

    async def run(self, request: Request, work: Callable[[], Awaitable[Response]]) -> Response | Failure:
        """Do the work; whatever it raises becomes the request's Failure."""
        try:
            result: Response | Failure = await work()
        except TinkerError as error:
            result = Failure(error=str(error), category="user")
        except asyncio.CancelledError:
            self.finish(request, Failure(error="it was cancelled", category="user"))
            raise
        except Exception:
            log.exception("request %s failed", request.request_id)
            result = Failure(
                error=f"the server failed; its log says why under request {request.request_id}",
                category="server",
            )
        self.finish(request, result)
        return result

    def finish(self, request: Request, result: Response | Failure) -> None:
        """Its first result counts."""
        if request.result is not None:
            return
        request.result, request.result_bytes = result, result_bytes(result)
        request.task = None
        held = self._held[request.owner]
        held.num_waiting -= 1
        held.waiting_bytes -= request.num_bytes
        held.waiting_by_model[request.model_id] -= request.model_id is not None
        if not held.waiting_by_model[request.model_id]:
            del held.waiting_by_model[request.model_id]
        held.results[request.request_id] = request
        held.result_bytes += request.result_bytes
        request.done.set()
        self._make_room(held)

    async def retrieve(self, request_id: str, *, wait_s: float) -> Response | Failure | None:
        request = self._find(request_id)
        if request.result is None:
            try:
                async with asyncio.timeout(wait_s):
                    await request.done.wait()
            except TimeoutError:
                return None
            if self._closed:
                raise GoneError(_CLOSED)
        if request.result is not None:
            self._forget_later(request)
        return request.result

    def cancel(self, request_id: str) -> None:
        request = self._find(request_id)
        if request.result is not None:
            return
        if request.task is None:
            raise InvalidRequestError(
                f"request {request_id} is of a model in training; only samples can be cancelled"
            )
        task = request.task
        # A task that has not begun could not say so itself.
        self.finish(request, Failure(error="it was cancelled", category="user"))
        task.cancel()

    def end_samples(self, session_id: str, owner: str, error: str) -> None:
        """Of a session that has ended."""
        for request in tuple(self._requests.values()):
            task = request.task
            if (
                task is not None
                and request.owner == owner
                and request.request_id.startswith(f"{session_id}:")
            ):
                fail_all(self, (request,), error)
                task.cancel()

    def forget_session(self, session_id: str, owner: str) -> None:
        """Nobody may come for a session's results any more: keep them as if they were retrieved now."""
        held = self._held.get(owner)
        for request in () if held is None else tuple(held.results.values()):
            if request.request_id.startswith(f"{session_id}:"):
                self._forget_later(request)

    def close(self) -> None:
        """Wake whoever waits, and take nothing on any more. What is finished can still be retrieved."""
        self._closed = True
        for request in self._requests.values():
            request.done.set()

    def _find(self, request_id: str) -> Request:
        if (request := self._requests.get(request_id)) is None:
            raise GoneError(
                f"there is no result of request {request_id} any more: it was retrieved more than "
                f"{self._limits.result_kept_s:g} s ago, or more came after it than are kept"
            )
        return request

    def _forget_later(self, request: Request) -> None:
        if request.forgetting is None and self._requests.get(request.request_id) is request:
            held = self._held[request.owner]
            held.retrieved[request.request_id] = held.results.pop(request.request_id)
            loop = asyncio.get_running_loop()
            request.forgetting = loop.call_later(self._limits.result_kept_s, self._forget, request)

    def _make_room(self, held: _Held) -> None:
        """Forget results until both limits hold: first those that were retrieved, then the oldest, never the
        newest."""
        while (num := len(held.results) + len(held.retrieved)) > 1 and (
            num > self._limits.results or held.result_bytes > self._limits.result_bytes
        ):
            self._forget(next(iter((held.retrieved or held.results).values())))

    def _forget(self, request: Request) -> None:
        held = self._held[request.owner]
        if request.forgetting is not None:
            request.forgetting.cancel()
            del held.retrieved[request.request_id]
        else:
            del held.results[request.request_id]
        held.result_bytes -= request.result_bytes
        del self._requests[request.request_id]
        if not held.results and not held.retrieved and not held.num_waiting:
            del self._held[request.owner]


def fail_all(futures: Futures, requests: Iterable[Request], error: str) -> None:
    for request in requests:
        futures.finish(request, Failure(error=error, category="user"))
