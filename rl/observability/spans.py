"""Spans: what each process does now, and what it has done.

    RECORDER.start(logs, role="trainer", rank=0)
    with span("forward_backward", version=3):
        ...

Two files of a run's logs hold the recording of a process:

- `state/<role>-<rank>.json`: the spans that are open. The file is one JSON object padded to a fixed
  size and rewritten in place by one system call whenever a span begins or ends, so other processes
  can read it at any time, also when the process is stopped or dead, and on a full disk.
- `spans/<role>-<rank>.jsonl`: the spans that have ended, one Chrome trace event a line.

`read_states` reads the former, `rl.observability.timeline` the latter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rl.config.configurable import only_if
from rl.config.tree import check_bounds
from rl.utils.errors import RunError
from rl.utils.files import BoundedFile, parse_json, read_regular
from rl.utils.printing import replace_controls
from rl.utils.processes import ProcessId, get_pid_namespace, identify

P = ParamSpec("P")
SelfT = TypeVar("SelfT")
ResultT = TypeVar("ResultT")

STATE_FOLDER = "state"
"""Folder of the open spans, in a run's logs."""
SPANS_FOLDER = "spans"
"""Folder of the ended spans, in a run's logs."""
STATE_BYTES = 4096
MAX_OPEN_NAMES = 12
"""Names of open spans that the state file lists; the oldest are kept."""
WAITS = "waits for "
"""Prefix of the names of spans that wait for another process."""
_READ_ATTEMPTS = 20
"""Attempts to read a state file that is being written."""
MAX_TIME_S = 1e12
"""Bound on times in seconds since 1970: neither NaN nor infinity is one."""
_MAX_PID = 2**31 - 1
_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
MAX_NAME_CHARACTERS = 100
MAX_ERROR_CHARACTERS = 200


@dataclass(kw_only=True, slots=True)
class TimelineConfig:
    """Recording of the spans that have ended."""

    enable: bool = True
    """Write logs/spans, from which `python -m rl.timeline` makes a timeline."""
    max_megabytes: float = field(default=32.0, metadata=only_if("enable", True))
    """Largest size of one process's spans; the oldest spans are dropped."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_megabytes", at_least=0.1, below=math.inf)


# Recording


class _OpenSpan(NamedTuple):
    start_s: float
    version: int | None


class SpanRecorder:
    """Recorder of the spans of one process. Thread-safe.

    Times are those of the monotonic clock plus an offset to the wall clock that is read once, so
    that setting the wall clock changes no duration.
    """

    def __init__(
        self, *, log: BoundedFile | None = None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`log` receives the ended spans, until `start` or `stop`."""
        self.log = log
        self.on_begin: Callable[[str], None] | None = None
        """Callback with the name of each span, called after the span was recorded as open."""
        self._offset_s = wall_clock() - time.monotonic()
        self._lock = threading.Lock()
        # By name and number, oldest first: hundreds of spans of one name may be open.
        self._open: dict[str, dict[int, _OpenSpan]] = {}
        self._numbers = itertools.count()
        self._policy_version: int | None = None
        self._failed = "null"
        """The last span that ended with an error, as JSON."""
        self._process = ""
        """Identity of the process, as fields of JSON."""
        self._descriptor: int | None = None
        self._num_writes = 0

    def start(
        self, logs: Path, *, role: str, rank: int, timeline: TimelineConfig | None = None
    ) -> Path:
        """Record under this name from now on, and return the state file.

        Without `timeline` only the open spans are recorded. Raises OSError if the files cannot be
        made.
        """
        file = logs / STATE_FOLDER / f"{role}-{rank}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        process = identify(os.getpid())
        assert process is not None
        with self._lock:
            self._close()
            # What stays the same is put into text once.
            identity = {
                "role": role,
                "rank": rank,
                "host": socket.gethostname(),
                "pid": process.pid,
                "start_ticks": process.start_ticks,
                "pid_namespace": get_pid_namespace(),
                "clock_offset_s": self._offset_s,
            }
            self._process = json.dumps(identity)[1:-1]
            # Of one size from the start, so that no write has to extend the file.
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._descriptor, STATE_BYTES)
            self._write_state(self._read_clock_s())
            if timeline is not None and timeline.enable:
                path = logs / SPANS_FOLDER / f"{role}-{rank}.jsonl"
                path.parent.mkdir(exist_ok=True)
                self.log = BoundedFile(path, max_bytes=int(timeline.max_megabytes * 1e6))
        return file

    def stop(self) -> None:
        """Record nothing from now on; the files stay."""
        with self._lock:
            self._close()

    def begin(self, name: str, version: int | None) -> int:
        """Open a span and return its number."""
        number = next(self._numbers)
        with self._lock:
            start_s = self._read_clock_s()
            if version is not None:
                self._policy_version = version
            self._open.setdefault(name, {})[number] = _OpenSpan(start_s, version)
            self._write_state(start_s)
        # Without the lock: `tools/fault_injection.py` ends the process here.
        if self.on_begin is not None:
            self.on_begin(name)
        return number

    def end(self, name: str, number: int, error: BaseException | None = None) -> None:
        """Close a span; a cancelled span counts as ended without an error."""
        with self._lock:
            end_s = self._read_clock_s()
            same_name = self._open[name]
            start_s, version = same_name.pop(number)
            if not same_name:
                del self._open[name]

            args: dict[str, object] = {} if version is None else {"version": version}
            if isinstance(error, Exception):
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                args["error"] = text[:MAX_ERROR_CHARACTERS]
                failed = {"name": name[:MAX_NAME_CHARACTERS], "error": args["error"], "at_s": end_s}
                self._failed = json.dumps(failed)
            self._write_state(end_s)

            if self.log is not None:
                start_us, took_us = round(start_s * 1e6), round((end_s - start_s) * 1e6, 1)
                # A full disk loses spans, but ends no run.
                with contextlib.suppress(OSError):
                    self.log.append(
                        f'{{"ph": "X", "name": {_encode_json(name)}, "ts": {start_us}, "dur": '
                        f'{took_us}, "args": {json.dumps(args) if args else "{}"}}}\n'
                    )

    def _read_clock_s(self) -> float:
        return time.monotonic() + self._offset_s

    def _write_state(self, now_s: float) -> None:
        if self._descriptor is None:
            return
        self._num_writes += 1

        # Put together by hand: a run writes the state thousands of times a step, and json.dumps of
        # the whole takes five times as long.
        open_spans = []
        for name, same_name in itertools.islice(self._open.items(), MAX_OPEN_NAMES):
            since_s, version = next(iter(same_name.values()))
            open_spans.append(
                f'{{"name": {_encode_json(name[:MAX_NAME_CHARACTERS])}, "num": {len(same_name)}, '
                f'"version": {_format_number(version)}, "since_s": {since_s!r}}}'
            )

        # A reader that finds two different numbers has read during a write.
        latest = _format_number(self._policy_version)
        head = (
            f'{{"write": {self._num_writes}, {self._process}, "policy_version": {latest}, '
            f'"failed": {self._failed}, "changed_s": {now_s!r}, "open": ['
        )
        tail = f'], "end": {self._num_writes}}}'
        text = head + ", ".join(open_spans) + tail
        while len(text) >= STATE_BYTES:
            open_spans.pop()
            text = head + ", ".join(open_spans) + tail
        # A run goes on without its recording.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, f"{text:<{STATE_BYTES - 1}}\n".encode(), 0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self.log is not None:
            self.log.close()
            self.log = None


# Names repeat, and this runs thousands of times a step.
@functools.lru_cache(maxsize=1024)
def _encode_json(text: str) -> str:
    return json.dumps(text)


def _format_number(number: int | None) -> str:
    return "null" if number is None else str(int(number))


class span:  # noqa: N801  (used like a function)
    """Span of this process: a context manager, or a decorator of a coroutine method.

    Example:
        >>> with span("forward_backward", version=3):
        ...     result = await engine.forward_backward(samples)

    A decorated method's span has the version of the object's `policy_version`, if there is one.
    """

    __slots__ = ("_name", "_number", "_version")

    def __init__(self, name: str, *, version: int | None = None) -> None:
        """`version` is the policy version of the weights that are read or made."""
        self._name = name
        self._version = version

    def __enter__(self) -> None:
        self._number = RECORDER.begin(self._name, self._version)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        RECORDER.end(self._name, self._number, error)

    def __call__(
        self, method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]]
    ) -> Callable[Concatenate[SelfT, P], Coroutine[Any, Any, ResultT]]:
        name = self._name

        @functools.wraps(method)
        async def recorded(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> ResultT:
            with span(name, version=getattr(self, "policy_version", None)):
                return await method(self, *args, **kwargs)

        return recorded


RECORDER = SpanRecorder()
"""The recorder of this process."""


@contextlib.contextmanager
def add_error_context(where: str) -> Iterator[None]:
    """Record a span of this name, and add the name to an error as its position in the run.

    A `RunError` keeps the innermost position; any other error gets each of them as a note.
    """
    try:
        with span(where):
            yield
    except RunError as error:
        error.where = error.where or where
        raise
    except Exception as error:
        error.add_note(where)
        raise


# Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSpan:
    """The open spans of one name in one process."""

    name: str
    num: int
    version: int | None
    """Policy version of the oldest span."""
    since_s: float
    """Start of the oldest span, in seconds since 1970."""

    def __str__(self) -> str:
        times = "" if self.num == 1 else f" ({self.num} times)"
        return f"{self.name}{times}{'' if self.version is None else f' of version {self.version}'}"


class FailedSpan(NamedTuple):
    """The last span that ended with an error."""

    name: str
    error: str
    """Class and beginning of the message."""
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """Open spans of one process. Times are in seconds since 1970, by the clock of the process."""

    role: str
    rank: int
    host: str
    process: ProcessId
    clock_offset_s: float
    """Difference between the clock of the process and the monotonic clock of its machine."""
    policy_version: int | None
    """Policy version of the latest span that had one."""
    open: tuple[OpenSpan, ...]
    """Open spans, oldest first; empty while the process waits for requests."""
    changed_s: float
    """Time at which a span last began or ended."""
    failed: FailedSpan | None
    pid_namespace: int | None = None
    """Namespace of the pid; None if unknown."""

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"

    @property
    def is_here(self) -> bool:
        """True for a process of this machine, of which this process sees the pid."""
        namespaces = (None, get_pid_namespace())
        return self.host == socket.gethostname() and self.pid_namespace in namespaces

    @property
    def place(self) -> str:
        """Machine of the process, for a reader."""
        # A container with the network of its machine may have the machine's name.
        is_apart = self.host == socket.gethostname() and not self.is_here
        return f"{self.host}, in another container" if is_apart else self.host

    def get_age_s(self, at_s: float) -> float:
        """Return the seconds since one of this state's times."""
        # The monotonic clock is one for all processes of a machine, and nobody sets it.
        now_s = time.monotonic() + self.clock_offset_s if self.is_here else time.time()
        return max(0.0, now_s - at_s)

    def describe(self) -> str:
        """Return the open spans and their ages.

        Example:
            >>> read_state(logs / "state" / "trainer-0.json").describe()
            'forward_backward of version 3 for 12.0 s'
        """
        text = ", ".join(f"{span} for {self.get_age_s(span.since_s):.1f} s" for span in self.open)
        text = text or f"idle for {self.get_age_s(self.changed_s):.1f} s"
        if self.failed is None:
            return text
        age_s = self.get_age_s(self.failed.at_s)
        return f"{text}; {self.failed.name} failed {age_s:.1f} s ago: {self.failed.error}"


def read_state(file: Path) -> ProcessState:
    """Read the state file of one process.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is not a regular file.
        ValueError: its content is not that of a state file of this name.
    """
    # A read during a write has parts of both; the next read finds the file whole.
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = parse_json(read_regular(file))
            if record["write"] == record["end"]:
                return _parse_state(record, name=file.stem)
    raise ValueError(f"{file} is not the state file of a process")


def read_states(logs: Path) -> Iterator[ProcessState]:
    """Yield the states of all processes of a run by name, without unreadable files."""
    for file in sorted((logs / STATE_FOLDER).glob("*.json")):
        with contextlib.suppress(ValueError, OSError):
            yield read_state(file)


def _parse_state(record: dict[str, Any], *, name: str) -> ProcessState:
    """Return the state that a file of this name holds; raise if anything in it is not of its type.

    The folder of a run may come from anybody, and a role and a rank are parts of the names of other
    files.
    """
    role, rank, failed = (
        _check_text(record["role"]),
        _check_integer(record["rank"]),
        record["failed"],
    )
    # "../x" as a role would name a file outside of the folder.
    if _ROLE.fullmatch(role) is None or name != f"{role}-{rank}":
        raise ValueError(f"role {role!r} and rank {rank} are not those of the file {name}")
    return ProcessState(
        role=role,
        rank=rank,
        host=_check_text(record["host"]),
        # Pid 0 and negative pids stand for whole groups of processes.
        process=ProcessId(
            _check_integer(record["pid"], at_least=1, at_most=_MAX_PID),
            _check_integer(record["start_ticks"]),
        ),
        clock_offset_s=_check_number(record["clock_offset_s"]),
        policy_version=_check_optional_integer(record["policy_version"]),
        open=tuple(_parse_open_span(span) for span in record["open"]),
        changed_s=_check_number(record["changed_s"]),
        failed=None if failed is None else _parse_failed_span(failed),
        pid_namespace=_check_optional_integer(record.get("pid_namespace")),
    )


def _parse_open_span(span: dict[str, Any]) -> OpenSpan:
    return OpenSpan(
        name=_check_text(span["name"]),
        num=_check_integer(span["num"]),
        version=_check_optional_integer(span["version"]),
        since_s=_check_number(span["since_s"]),
    )


def _parse_failed_span(span: dict[str, Any]) -> FailedSpan:
    return FailedSpan(
        name=_check_text(span["name"]),
        error=_check_text(span["error"]),
        at_s=_check_number(span["at_s"]),
    )


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return replace_controls(value)


def _check_integer(value: object, *, at_least: int = 0, at_most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise TypeError(f"{value!r} is not an integer from {at_least} to {at_most}")
    return value


def _check_optional_integer(value: object) -> int | None:
    return None if value is None else _check_integer(value)


def _check_number(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= MAX_TIME_S
    ):
        raise TypeError(f"{value!r} is not a time in seconds")
    return value
