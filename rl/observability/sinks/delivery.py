"""What a backend is given: each record of metrics.jsonl once, however often it fails or the run goes back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rl.observability.sinks.place import Place, Sent
from rl.observability.sinks.tail import MetricsTail, NumberedRecord

RETRY_S = (1.0, 5.0, 15.0, 60.0)
"""How long a backend is left alone after each failure in a row; the last holds for all further ones."""

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Who takes records; all calls are made in one thread, and any may raise anything."""

    name: str

    def open(self, sent: Sent) -> Place | None:
        """Be ready for records, be it for the first time, after a failure, or as the run has gone back.

        Args:
            sent: what it was given, in this process or an earlier one, and what of that will come again.

        Returns:
            The last record that need not be given to it; None: all are.
        """
        ...

    def write(self, record: NumberedRecord) -> None:
        """Take one."""
        ...

    def close(self, *, failed: bool) -> None:
        """Let go of everything; `failed`: with an error. Idempotent."""
        ...


class Delivery:
    """Of one file to one backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        metrics: Path,
        sent: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As `Follower`."""
        self.num_failures = 0
        """Calls of the backend that raised."""
        self.busy_since: float | None = None
        """When the call of the backend that goes on began, by the clock."""
        self.has_all = True
        """Whether the backend had all that there was when it was asked last."""
        self.problem: str | None = None
        """What is to be said after `close`."""
        self._backend = backend
        self._tail = MetricsTail(metrics)
        self._sent_file = sent
        self._clock = clock
        self._sent: Sent | None = None
        self._keeps: list[Place | None] = []
        """Of restarts that are not in the file of what was sent."""
        self._held: Place | None = None
        """The last record that the backend has; known while it is open."""
        self._is_open = False
        self._num_in_a_row = 0
        self._retry_at = 0.0

    def restart(self, keep: Place | None) -> None:
        """The file ended with this record (None: it was empty), and may have had more before."""
        self._is_open = False
        self._keeps.append(keep)
        self.catch_up()

    def look(self) -> None:
        """There is something new; nothing happens where the last failure is too recent."""
        if self._clock() >= self._retry_at:
            self.catch_up()

    def catch_up(self) -> None:
        """Give all that there is."""
        try:
            if not self._is_open:
                self._open()
            for record in self._tail:
                if self._held is None or record.place > self._held:
                    self._give(record)
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            self._failed(error)
            return
        self._retry_at, self.has_all = 0.0, True

    def close(self, *, failed: bool) -> None:
        """At the end of the run; `failed`: it ended with an error."""
        self._tail.close()
        error = self._close(failed=failed)
        if not self.has_all:
            self.problem = f"could not be written: {self.what_is_missing()}"
        elif error is not None:
            self.problem = f"may lack some of the records, as it was not closed in order: {error!r}"

    def what_is_missing(self) -> str:
        """Such as "it lacks what came after step 3, which is in outputs/x/metrics.jsonl"."""
        last = None if self._sent is None else self._sent.last
        after = "all of it" if last is None else f"what came after step {last.step}"
        return f"it lacks {after}, which is in {self._tail.path}"

    def _open(self) -> None:
        if self._sent is None:
            self._sent = Sent.read(self._sent_file)
        while self._keeps:
            self._sent.cut(self._keeps[0])
            self._keeps.pop(0)
        with self._busy():
            self._held = self._backend.open(self._sent)
        if self._held != self._sent.last:
            self._sent.next_number = 0  # it has forgotten some
        self._tail.restart()
        self._sent.save(self._held)
        self._is_open = True

    def _give(self, record: NumberedRecord) -> None:
        assert self._sent is not None
        # A run that goes on with fewer evaluations gives later records the numbers of earlier ones.
        number = max(record.number, self._sent.next_number)
        with self._busy():
            self._backend.write(replace(record, number=number))
        self._sent.next_number = number + 1
        self._held = record.place
        self._sent.save(record.place)
        if self._num_in_a_row:
            logger.info("%s takes records again", self._backend.name)
        self._num_in_a_row = 0

    def _failed(self, error: Exception) -> None:
        self._close(failed=True)
        self._is_open = self.has_all = False
        self._retry_at = self._clock() + RETRY_S[min(self._num_in_a_row, len(RETRY_S) - 1)]
        self._num_in_a_row += 1
        self.num_failures += 1
        logger.log(
            logging.WARNING if self.num_failures == 1 else logging.INFO,
            "%s was not written: %s: %s; training goes on, and it is tried again from %s",
            self._backend.name,
            type(error).__name__,
            error,
            self._tail.path.name,
        )

    def _close(self, *, failed: bool) -> Exception | None:
        try:
            with self._busy():
                self._backend.close(failed=failed)
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            logger.info("%s was not closed: %r", self._backend.name, error)
            return error
        return None

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self.busy_since = self._clock()
        try:
            yield
        finally:
            self.busy_since = None
