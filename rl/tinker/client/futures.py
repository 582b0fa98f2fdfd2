"""Results of calls that run in the clients' thread."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import TypeVar

from tinker.lib.public_interfaces import AwaitableConcurrentFuture

T = TypeVar("T")

THREAD_NAME = "tinker-client"


class ClientFuture(AwaitableConcurrentFuture[T]):
    """An official `APIFuture`.

    `await` it in any event loop, or wait with `result`, also where an event loop runs (as in a notebook):
    what computes the result does not need that loop. Cancelling `future()` cancels the work of a sample.
    """

    def __init__(self, future: Future[T]) -> None:
        super().__init__(future)
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after `timeout` seconds, and what the call raised."""
        if not self._future.done():
            if threading.current_thread().name == THREAD_NAME:
                raise RuntimeError(
                    "result() in the clients' own thread would wait for itself: await it instead"
                )
            if os.getpid() != self._process:
                raise RuntimeError("the result comes to the process that this one was forked from")
        return self._future.result(timeout)

    def __repr__(self) -> str:
        future = self._future
        if not future.done():
            state = "pending"
        elif future.cancelled():
            state = "cancelled"
        elif (error := future.exception()) is not None:
            state = f"failed: {error!r}"
        else:
            state = f"done: {type(future.result()).__name__}"
        return f"<{type(self).__name__} {state}>"


def finished(value: T) -> ClientFuture[T]:
    """One whose result is there."""
    future: Future[T] = Future()
    future.set_result(value)
    return ClientFuture(future)
