"""A sink that may fail or hang: it follows metrics.jsonl in a thread of its own, and holds nobody up.

    loop -> metrics.jsonl -> (thread) -> TensorBoard, W&B, trackio

The loop only says that there is something new. What a sink could not take is still in the file, so it is
tried again from there, in this process or in the one that resumes the run, and memory does not grow with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.observability.metrics import Record
from rl.observability.sinks.delivery import Backend, Delivery
from rl.observability.sinks.place import Place


@dataclass(frozen=True, slots=True)
class _Restart:
    keep: Place | None


logger = logging.getLogger(__name__)


class Follower:
    """A `Sink` of the loop."""

    def __init__(
        self,
        backend: Backend,
        *,
        metrics: Path,
        sent: Path,
        write_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            metrics: metrics.jsonl, which may not be there yet.
            sent: file that keeps what the backend was given.
            write_s: a call of the backend that takes longer is said to hang.
            clock: seconds, monotonic.
        """
        self.name = backend.name
        self._delivery = Delivery(backend, metrics=metrics, sent=sent, clock=clock)
        self._write_s = write_s
        self._clock = clock
        self._words: queue.SimpleQueue[_Restart | Literal["look", "end", "fail"]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._told_hang = False
        self._has_ended = False
        """In order: whatever a backend does to its thread."""

    @property
    def num_failures(self) -> int:
        """Calls of the backend that raised."""
        return self._delivery.num_failures

    def begin(self, keep: Place | None) -> None:
        """The loop begins, or begins again: metrics.jsonl ends with this record, None: it is empty."""
        if self._thread.ident is None:
            self._thread.start()
        self._words.put(_Restart(keep))

    def write(self, record: Record) -> None:
        """This record is in metrics.jsonl now. Returns at once."""
        self._words.put("look")
        since = self._delivery.busy_since
        if since is None or self._told_hang or (for_s := self._clock() - since) <= self._write_s:
            return
        self._told_hang = True
        logger.warning(
            "%s has not answered for %.0f s; training goes on, and it gets what it misses if it comes back",
            self.name,
            for_s,
        )

    def end(self, *, failed: bool) -> None:
        """Take what there is, and end; see `join`."""
        self._words.put("fail" if failed else "end")

    def join(self, limit_s: float) -> bool:
        """Whether in that time the thread has ended and the backend has everything; else that is logged."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, limit_s))
        if self._thread.is_alive():
            problem = f"was not done when the run ended: {self._delivery.what_is_missing()}"
        elif not self._has_ended:
            problem = f"ended before the run did: {self._delivery.what_is_missing()}"
        elif self._delivery.problem is not None:
            problem = self._delivery.problem
        else:
            return True
        logger.warning("%s %s", self.name, problem)
        return False

    def _work(self) -> None:
        while True:
            word = self._words.get()
            if isinstance(word, _Restart):
                self._delivery.restart(word.keep)
            elif word == "look":
                self._delivery.look()
            else:
                self._delivery.catch_up()
                self._delivery.close(failed=word == "fail")
                self._has_ended = True
                return
