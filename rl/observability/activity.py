"""What a process is doing, for whoever waits for it: logs/state/<role>-<rank>.json; and what it has done:
logs/spans (`rl.observability.span_file`).

    THIS_PROCESS.start(logs / "state", role="trainer", rank=0)
    with doing("forward_backward", version=3):
        ...

The file is one JSON object in a record of a fixed size, written anew in place, by one call, whenever
something begins or ends: it can be read at any time, also when the process is stopped or dead, and takes no
more room on a disk that is full. Activities overlap; those of one name are told as one, with their number
and the start of the oldest. `rl.observability.process_state` reads it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rl.observability.span_file import SpanFile, quoted
from rl.process_id import identify

P = ParamSpec("P")
SelfT = TypeVar("SelfT")
ResultT = TypeVar("ResultT")

RECORD_BYTES = 4096
MAX_NAMES = 12
"""Names of activities that a record has room for; the oldest are told."""
MAX_NAME = 100
MAX_ERROR = 200
"""Characters."""
STATE_FOLDER = "state"
"""Within a run's logs."""


class _Begun(NamedTuple):
    """An activity that goes on."""

    told: str
    """What the record says of it."""
    at_s: float
    """By `time.monotonic`."""
    version: int | None


class Activity:
    """Of one process. Used from any thread."""

    def __init__(self) -> None:
        self.on_begin: Callable[[str], None] | None = None
        """Called with the name of each activity that begins, before its body."""
        self.policy_version: int | None = None
        """That was named last."""
        self._lock = threading.Lock()
        self._running: dict[str, dict[int, _Begun]] = {}
        """By name and number, oldest first."""
        self._numbers = itertools.count()
        self._idle = _now(time.monotonic())
        self._failed = "null"
        """What ended with an error last."""
        self._head = ""
        self._file: Path | None = None
        self._descriptor: int | None = None
        self._spans: SpanFile | None = None
        self._change = 0

    def start(self, folder: Path, *, role: str, rank: int) -> Path:
        """Tell it in this folder from now on, and nowhere else; returns the file."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{role}-{rank}.json"
        process = identify(os.getpid())
        assert process is not None
        head = json.dumps(
            {
                "role": role,
                "rank": rank,
                "pid": process.pid,
                "start_ticks": process.start_ticks,
                "host": socket.gethostname(),
            }
        )
        with self._lock:
            self._close()
            if self._file is not None and self._file != file:
                self._file.unlink(missing_ok=True)  # Under another name it would count as dead.
            self._file = file
            self._head = head[1:-1]
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._descriptor, RECORD_BYTES)
            self._write(_now(time.monotonic()))
        return file

    def keep_spans(self, file: SpanFile | None) -> None:
        """Write there what has ended from now on, until `stop`; None: nowhere."""
        with self._lock:
            self._close_spans()
            self._spans = file

    def stop(self) -> None:
        """Tell nothing any more; the files stay."""
        with self._lock:
            self._close()
            self._close_spans()

    def begin(self, name: str, version: int | None) -> int:
        """An activity's number, for its `end`."""
        number = next(self._numbers)
        of_version = "null" if version is None else version
        at_s = time.monotonic()
        now = _now(at_s)
        begun = _Begun(f'{{"version": {of_version}, {now}}}', at_s, version)
        with self._lock:
            if version is not None:
                self.policy_version = version
            self._running.setdefault(name, {})[number] = begun
            self._write(now)
        if self.on_begin is not None:
            self.on_begin(name)
        return number

    def end(self, name: str, number: int, error: BaseException | None = None) -> None:
        """`error`: of what it has failed."""
        at_s = time.monotonic()
        now = _now(at_s)
        with self._lock:
            told = None
            # What is given up has not failed.
            if isinstance(error, Exception):
                told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR]
                named = f'"what": {quoted(name[:MAX_NAME])}, "error": {json.dumps(told)}'
                self._failed = f'{{{named}, "at": {{{now}}}}}'
            of_name = self._running[name]
            begun = of_name.pop(number)
            if not of_name:
                del self._running[name]
                if not self._running:
                    self._idle = now
            self._write(now)
            if self._spans is not None:
                self._spans.add(
                    name,
                    began_s=begun.at_s,
                    ended_s=at_s,
                    version=begun.version,
                    error=told,
                    more=bool(self._running),
                )

    def _write(self, now: str) -> None:
        if self._descriptor is None:
            return
        self._change += 1
        listed = [
            f'{{"what": {quoted(name[:MAX_NAME])}, "num": {len(all_of)}, '
            f'"oldest": {next(iter(all_of.values())).told}}}'
            for name, all_of in itertools.islice(self._running.items(), MAX_NAMES)
        ]
        while len(record := self._record(listed, now)) > RECORD_BYTES:
            listed.pop()
        # A run does not end because nobody can be told what it does.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, record.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def _record(self, listed: list[str], now: str) -> bytes:
        version = "null" if self.policy_version is None else self.policy_version
        # A reader that sees two numbers has read while this was written.
        return (
            f'{{"change": {self._change}, {self._head}, "policy_version": {version}, '
            f'"failed": {self._failed}, "changed": {{{now}}}, "idle": {{{self._idle}}}, '
            f'"doing": [{", ".join(listed)}], "end": {self._change}}}'
        ).encode()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _close_spans(self) -> None:
        if self._spans is not None:
            self._spans.close()
            self._spans = None


class doing:  # noqa: N801  (reads as what it does)
    """`with doing("push", version=3):` this process pushes."""

    __slots__ = ("_name", "_number", "_version")

    def __init__(self, name: str, *, version: int | None = None) -> None:
        """`version` is that of the weights that are read or made."""
        self._name = name
        self._version = version

    def __enter__(self) -> None:
        self._number = THIS_PROCESS.begin(self._name, self._version)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        THIS_PROCESS.end(self._name, self._number, error)


def during(
    name: str,
) -> Callable[
    [Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]]],
    Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]],
]:
    """Around a coroutine method: it is this activity, of the object's `policy_version` if it has one."""

    def decorate(
        function: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]],
    ) -> Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]]:
        @functools.wraps(function)
        async def told(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> ResultT:
            with doing(name, version=getattr(self, "policy_version", None)):
                return await function(self, *args, **kwargs)

        return told

    return decorate


def _now(monotonic_s: float) -> str:
    """By the wall clock, for other machines, and by the clock that nobody sets."""
    return f'"since": {time.time():.3f}, "since_monotonic_s": {monotonic_s:.3f}'


THIS_PROCESS = Activity()
