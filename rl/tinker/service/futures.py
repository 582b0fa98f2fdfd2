"""Accepted requests and their results, and the service's background tasks.

    accept      counts a request's bytes against the limits, and enters it into the table
    complete    does its work, and stores the encoded answer or the failure
    retrieve    waits for the result, as often as the client asks
    _drop       removes the result, after `limits.result_kept_s` or for newer results

Requests about a model wait for their turn between the first two (streams.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import pydantic
from google.protobuf.message import Message
from tinker import types as wire

from rl.tinker.types import (
    BusyError,
    GoneError,
    InvalidRequestError,
    Limits,
    TinkerError,
    UnsavedError,
)
from rl.tinker.wire.codec import PROTOBUF
from rl.utils.printing import truncate

log = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_BYTES = 512 * 1024
"""Bytes counted for a waiting request besides its tensors: at the default limit, at most 16,384
requests wait.
"""
SMALL_BYTES = 4096
"""Bytes counted for a result besides its body, and for each sample that a request waits for."""
INLINE_BYTES = 256 * 1024
"""Bytes of a result that are encoded in the event loop, in less time than a change of threads
takes.
"""
_CLOSED = "the service is closing"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The encoded answer to a request, in the official client's own types."""

    body: bytes
    media_type: str = "application/json"
    error: str | None = None
    """Text of a RequestFailedResponse, for work that failed."""


Answer: TypeAlias = Result | pydantic.BaseModel
Work: TypeAlias = Callable[[], Awaitable[Answer]]
"""Work of a request, which `Futures.complete` does."""


async def encode_message(make: Callable[[], Message], *, num_bytes: int) -> Result:
    """Make and encode a message of about this size, in a thread unless it is small."""

    def encode() -> bytes:
        return make().SerializeToString()

    body = encode() if num_bytes < INLINE_BYTES else await asyncio.to_thread(encode)
    return Result(body, PROTOBUF)


def _encode_json(answer: pydantic.BaseModel, error: str | None = None) -> Result:
    # Python's JSON has NaN, as the official client reads it: null would not be a number.
    return Result(json.dumps(answer.model_dump()).encode(), error=error)


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    """Entry of a request in the table, from its acceptance until its result is dropped."""

    request_id: str
    owner: str
    num_bytes: int
    result: Result | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """Task of a sample, which can be cancelled and ends with its session."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that drops the result."""


@dataclass(slots=True, eq=False)
class _Held:
    """Requests and results of one owner."""

    waiting_bytes: int = 0
    results: dict[str, int] = field(default_factory=dict)
    """Bytes of the results by request id, oldest first."""
    result_bytes: int = 0


class Futures:
    """Table of requests by id. The caller has checked that an id belongs to its owner."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: dict[str, AcceptedRequest] = {}
        self._held: dict[str, _Held] = {}
        """Accounts of the owners who have a request or a result; the number of owners divides what
        they share.
        """
        self._all = _Held()
        """Bytes of all owners."""
        self._closed = False

    @property
    def has_work(self) -> bool:
        """True while a request of any owner waits for its result."""
        return self._all.waiting_bytes > 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def accept(
        self, request_id: str, *, owner: str, num_bytes: int = 0, unblocks: bool = False
    ) -> AcceptedRequest:
        """Accept a request; raise BusyError at `limits.all_held_bytes`, unless it `unblocks` others
        that wait, or its owner has less than a share.
        """
        if self._closed:
            raise GoneError(_CLOSED)
        # A refusal opens no account, which would lower the share of the others.
        held = self._held.get(owner, _Held())
        num_bytes += REQUEST_BYTES

        most = self._limits.all_held_bytes
        share = most // len(self._held.keys() | {owner})
        is_full = self._all.waiting_bytes + num_bytes > most
        has_share = held.waiting_bytes + num_bytes > share
        # A single request above the limit has to pass at some time.
        if is_full and has_share and self._all.waiting_bytes and not unblocks:
            raise BusyError(
                f"limit all_held_bytes: the requests of all keys that wait have {most} bytes; wait"
            )

        self._all.waiting_bytes += num_bytes
        held.waiting_bytes += num_bytes
        self._held[owner] = held
        request = AcceptedRequest(request_id=request_id, owner=owner, num_bytes=num_bytes)
        self._requests[request_id] = request
        return request

    async def complete(self, request: AcceptedRequest, work: Work) -> None:
        """Do a request's work and store the answer; an exception becomes a
        RequestFailedResponse.
        """
        try:
            answer = await work()
            result = answer if isinstance(answer, Result) else _encode_json(answer)
            self._store_result(request, result)
        except UnsavedError as error:
            log.error("request %s: %s", request.request_id, error)
            self.fail(request, str(error), wire.RequestErrorCategory.Server)
        except TinkerError as error:
            self.fail(request, str(error))
        except asyncio.CancelledError:
            # Of a service that closes: `cancel` has set a result before.
            self.fail(request, "it was cancelled")
            raise
        except Exception:
            log.exception("request %s failed", request.request_id)
            text = f"the server failed; its log has the reason under request {request.request_id}"
            self.fail(request, text, wire.RequestErrorCategory.Server)

    def fail(
        self,
        request: AcceptedRequest,
        error: str,
        category: wire.RequestErrorCategory = wire.RequestErrorCategory.User,
    ) -> None:
        """Fail a request with a text for the client, without paths or other internals."""
        if request.result is None:
            error = truncate(error)
            answer = wire.RequestFailedResponse(error=error, category=category)
            self._store_result(request, _encode_json(answer, error))

    def _store_result(self, request: AcceptedRequest, result: Result) -> None:
        """Store a request's result, unless it has one, and wake those who wait for it."""
        if request.result is not None:
            return
        # Without its task, which would keep the request's data in memory.
        request.result, request.task = result, None
        held = self._held[request.owner]
        num_bytes = SMALL_BYTES + len(result.body)
        held.results[request.request_id] = num_bytes
        for one in (held, self._all):
            one.waiting_bytes -= request.num_bytes
            one.result_bytes += num_bytes
        request.done.set()
        loop = asyncio.get_running_loop()
        request.expiry = loop.call_later(self._limits.result_kept_s, self._drop, request)
        while self._all.result_bytes > self._limits.all_held_bytes:
            self._drop_oldest(max(self._held.values(), key=lambda one: one.result_bytes))

    async def retrieve(self, request_id: str, *, wait_s: float) -> Result | None:
        """Return a result, or None when there is none after `wait_s`."""
        request = self._find(request_id)
        if request.result is None:
            try:
                async with asyncio.timeout(wait_s):
                    await request.done.wait()
            except TimeoutError:
                return None
            # `close` sets the event too, so that no poll delays the end of the server.
            if self._closed:
                raise GoneError(_CLOSED)
        return request.result

    def cancel(self, request_id: str) -> None:
        """Fail a sample without a result, and end its work; training raises InvalidRequestError."""
        request = self._find(request_id)
        if request.result is None:
            if request.task is None:
                raise InvalidRequestError(
                    f"request {request_id} trains a model; only samples can be cancelled"
                )
            self._cancel(request, request.task, "it was cancelled")

    def end_samples(self, session_id: str, error: str) -> None:
        """Fail and cancel a session's samples."""
        for request in tuple(self._requests.values()):
            if request.task is not None and request.request_id.startswith(f"{session_id}:"):
                self._cancel(request, request.task, error)

    def _cancel(self, request: AcceptedRequest, task: asyncio.Task[None], error: str) -> None:
        # A task that has not begun would not report its cancellation.
        self.fail(request, error)
        task.cancel()

    def close(self) -> None:
        """Wake every waiting caller, and accept nothing more. Finished results can still be
        retrieved.
        """
        self._closed = True
        for request in self._requests.values():
            request.done.set()

    def _find(self, request_id: str) -> AcceptedRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise GoneError(
                f"there is no result of request {request_id}: it ended more than "
                f"{self._limits.result_kept_s:g} s ago, too many newer results came after it, or "
                "it came after it was given up"
            )
        return request

    def _drop_oldest(self, held: _Held) -> None:
        self._drop(self._requests[next(iter(held.results))])

    def _drop(self, request: AcceptedRequest) -> None:
        held = self._held.get(request.owner, _Held())
        num_bytes = held.results.pop(request.request_id, None)
        if num_bytes is not None:
            held.result_bytes -= num_bytes
            self._all.result_bytes -= num_bytes
            del self._requests[request.request_id]
            if request.expiry is not None:  # it would keep the result in memory
                request.expiry.cancel()
            if not held.results and not held.waiting_bytes:
                del self._held[request.owner]


class Background:
    """Tasks that run until they end or the service closes; failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """Start a task, which the log calls `what`."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._discard)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for all tasks, also those that they start; then cancel the rest and wait as long
        again.
        """
        # Work in progress ends by itself, such as a save; what does not end in time is cancelled.
        for cancel in (False, True):
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self._tasks:
                        for task in self._tasks if cancel else ():
                            task.cancel()
                        await asyncio.wait(self._tasks)
        for task in self._tasks:
            log.error("%s did not end", task.get_name())

    def _discard(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
