"""A sink that may fail or hang: it follows metrics.jsonl in a thread of its own, and holds nobody up.

    loop -> metrics.jsonl -> (thread) -> TensorBoard, W&B, trackio

The loop only says that there is something new. What a sink could not take is still in the file, so it is
tried again from there, in this process or in the one that resumes the run, and memory does not grow with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from rl.observability.metrics import Record
from rl.observability.sinks.place import Place, Sent
from rl.observability.sinks.tail import MetricsTail, NumberedRecord

RETRY_S = (1.0, 5.0, 15.0, 60.0)
"""How long the sink is left alone after each failure in a row; the last holds for all further ones."""

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What a follower writes to; all calls are made in one thread, and any may raise anything."""

    name: str

    def open(self, *, sent: Sent, keep: Place | None) -> Place | None:
        """Be ready for records, be it for the first time, after a failure, or as the run has gone back.

        Args:
            sent: what it was given, in this process or an earlier one; its last record is None for a new run.
            keep: the last record of metrics.jsonl: what it was given after that will come again.

        Returns:
            The last record that need not be given to it; None: all are.
        """
        ...

    def write(self, record: NumberedRecord) -> None:
        """Take one; returns when it would outlive this process."""
        ...

    def close(self, *, failed: bool) -> None:
        """Let go of everything; `failed`: the run ended with an error. Idempotent."""
        ...


class Follower:
    """Gives a backend each record of metrics.jsonl once."""

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
        self.num_failures = 0
        """Calls of the backend that raised."""
        self._backend = backend
        self._tail = MetricsTail(metrics)
        self._sent_file = sent
        self._write_s = write_s
        self._clock = clock
        self._words: queue.SimpleQueue[Literal["begin", "look", "end", "fail"]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._sent: Sent | None = None
        self._held: Place | None = None
        """The last record that the backend has; known while it is open."""
        self._is_open = False
        self._busy_since: float | None = None
        self._num_in_a_row = 0
        self._retry_at = 0.0
        self._told_hang = False
        self._has_all = True

    def begin(self) -> None:
        """The loop begins, or begins again: metrics.jsonl may have lost its last lines."""
        if not self._thread.is_alive():
            self._thread.start()
        self._words.put("begin")

    def write(self, record: Record) -> None:
        """This record is in metrics.jsonl now. Returns at once."""
        self._words.put("look")
        since = self._busy_since
        if since is not None and self._clock() - since > self._write_s and not self._told_hang:
            self._told_hang = True
            logger.warning(
                "%s has not taken a record for %g s; training goes on, and it gets what it misses if it "
                "comes back",
                self.name,
                self._clock() - since,
            )

    def end(self, *, failed: bool) -> None:
        """After what there is; see `join`."""
        self._words.put("fail" if failed else "end")

    def join(self, limit_s: float) -> bool:
        """Whether the thread has ended in that time and the backend has everything; else that is logged."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, limit_s))
        if self._thread.is_alive():
            logger.warning("%s was not done at the end of the run: %s", self.name, self._what_is_missing())
            return False
        if not self._has_all:
            logger.warning("%s could not be written: %s", self.name, self._what_is_missing())
        return self._has_all

    def _what_is_missing(self) -> str:
        last = None if self._sent is None else self._sent.last
        after = "all of it" if last is None else f"what came after step {last.step}"
        return f"it lacks {after}, which is in {self._tail.path}"

    # In the thread

    def _work(self) -> None:
        while True:
            word = self._words.get()
            if word == "begin":
                self._is_open = False
            is_last = word in ("end", "fail")
            if word != "look" or self._clock() >= self._retry_at:
                self._has_all = self._catch_up()
            if is_last:
                self._close(failed=word == "fail")
                self._tail.close()
                return

    def _catch_up(self) -> bool:
        """Whether the backend took all that there is."""
        try:
            if not self._is_open:
                self._open()
            for record in self._tail:
                if self._held is None or record.place > self._held:
                    self._give(record)
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            self._failed(error)
            return False
        if self._num_in_a_row:
            logger.info("%s takes records again", self.name)
        self._num_in_a_row, self._retry_at = 0, 0.0
        return True

    def _open(self) -> None:
        if self._sent is None:
            self._sent = Sent.read(self._sent_file)
        keep = self._tail.last_place()
        with self._busy():
            self._held = self._backend.open(sent=self._sent, keep=keep)
        self._tail.restart()
        self._sent.save(self._held)
        self._is_open = True

    def _give(self, record: NumberedRecord) -> None:
        assert self._sent is not None
        with self._busy():
            self._backend.write(record)
        self._held = record.place
        self._sent.save(record.place)

    def _failed(self, error: Exception) -> None:
        self._close(failed=True)
        self._is_open = False
        wait_s = RETRY_S[min(self._num_in_a_row, len(RETRY_S) - 1)]
        self._num_in_a_row += 1
        self._retry_at = self._clock() + wait_s
        self.num_failures += 1
        logger.log(
            logging.WARNING if self.num_failures == 1 else logging.INFO,
            "%s was not written: %s: %s; training goes on, and it is tried again from metrics.jsonl",
            self.name,
            type(error).__name__,
            error,
            exc_info=self.num_failures == 1 and logger.isEnabledFor(logging.DEBUG),
        )

    def _close(self, *, failed: bool) -> None:
        try:
            with self._busy():
                self._backend.close(failed=failed)
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            logger.info("%s was not closed: %s: %s", self.name, type(error).__name__, error)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = self._clock()
        try:
            yield
        finally:
            self._busy_since = None
