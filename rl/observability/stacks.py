"""Stacks of the threads and asyncio tasks of a run's processes, and reports with them.

    catch_signal()                             # in the main thread of each process, once
    write_stacks_to(logs, role="trainer", rank=0)
    ...
    text = await request_stacks(state, logs)   # in any process of the machine

    reports = await collect_reports(read_states(logs), logs)
    file = write_reports(reports, logs, title="trainer.optim_step gave no answer")
    error.more = format_excerpts(reports, file)

A signal asks for the stacks. `faulthandler` writes those of the threads in the signal handler
itself, even if the process is stuck in native code or in a deadlock on the interpreter's lock.
Those of the tasks follow as soon as the main thread runs Python.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from rl.observability.spans import STATE_FOLDER, ProcessState
from rl.utils.compat import list_tasks
from rl.utils.files import open_regular
from rl.utils.printing import replace_controls
from rl.utils.processes import (
    ProcessId,
    is_alive,
    is_signal_caught,
    is_written_by,
    read_kernel_state,
)

SIGNAL = signal.SIGUSR1
REQUEST_S = 2.0
"""Time a process has to write its stacks, which takes some 10 ms."""
POLL_S = 0.02
MAX_BYTES = 1 << 20
"""Bytes of one process's stacks that are read."""
END = "-- end of the stacks --\n"
ORDER = "(most recent call first):"
"""Words of `faulthandler`, used for tasks too."""

MAX_REPORTED = 8
"""Processes that an error message has room for."""
MAX_STACKS = 6
"""Stacks of each process in an error message."""
MAX_FRAMES = 4
"""Frames of each of these stacks."""
ROOT = f"{Path(__file__).resolve().parent.parent.parent}/"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_NOT_OURS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.|<|/(process_main|threads|launcher|interpreter)\.py$"
)
"""Files of Python, of packages, and of this project that are in the stacks of idle threads too."""

_file: BinaryIO | None = None


# In the process that is asked


def catch_signal() -> None:
    """Handle the signal in this process. Call it in the main thread; elsewhere it has no effect."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _write_stacks)


def write_stacks_to(logs: Path, *, role: str, rank: int) -> None:
    """Write the stacks of this process to the run's logs whenever they are requested."""
    global _file
    file = _get_file(logs, role=role, rank=rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    stop_writing_stacks()
    file.unlink(missing_ok=True)
    _file = file.open("ab", buffering=0)
    # Chaining to the default handler would end the process.
    chain = signal.getsignal(SIGNAL) is _write_stacks
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=chain)


def stop_writing_stacks() -> None:
    """Ignore requests from now on."""
    global _file
    faulthandler.unregister(SIGNAL)
    if _file is not None:
        _file.close()
        _file = None


def _get_file(logs: Path, *, role: str, rank: int) -> Path:
    return logs / STATE_FOLDER / f"{role}-{rank}.stacks"


def _write_stacks(number: int, frame: FrameType | None) -> None:
    """Write the tasks' stacks, in the main thread between two instructions of other code."""
    if _file is None:
        return
    try:
        _file.write(f"{_format_tasks()}{END}".encode())
    except Exception as error:  # noqa: BLE001  (must not surface in the code that was interrupted)
        os.write(2, f"stacks of tasks: {error!r}\n".encode())


def _format_tasks() -> str:
    """Return the stacks of the unfinished tasks of all event loops; equal stacks are merged."""
    names_at: dict[str, list[str]] = {}
    for task in list_tasks():
        frames = "" if task.done() else _format_frames(task.get_coro())
        if frames:
            names_at.setdefault(frames, []).append(task.get_name())

    # A run has hundreds of tasks that wait at the same place, such as one for each rollout.
    blocks = []
    for frames, names in names_at.items():
        more = f" and {len(names) - 1} more at the same place" if len(names) > 1 else ""
        blocks.append(f"\nTask {names[0]}{more} {ORDER}\n{frames}\n")
    return "".join(blocks)


def _format_frames(coroutine: Any) -> str:
    """Return the frames of a suspended coroutine, innermost first."""
    frames: list[str] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.insert(0, f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return "\n".join(frames)


# In the process that asks


async def request_stacks(state: ProcessState, logs: Path, *, timeout_s: float = REQUEST_S) -> str:
    """Return the stacks of a process of this machine, or one line that says why there are none."""
    if not state.is_here:
        return f"no stacks: it runs on {state.place}"

    # A process that is stopped or has no handler yet would not answer, or be ended by the signal.
    activity = read_kernel_state(state.process)
    if activity is None or not is_alive(state.process):
        return "no stacks: the process is dead"
    if "stop" in activity:
        return "no stacks: the process is stopped by a signal"
    if not is_signal_caught(state.process, SIGNAL):
        return "no stacks: the process does not listen yet"
    try:
        with open_regular(_get_file(logs, role=state.role, rank=state.rank)) as file:
            return await _request(state.process, file, timeout_s=timeout_s)
    except OSError as error:
        return f"no stacks: {error.strerror or error}"


async def _request(process: ProcessId, file: BinaryIO, *, timeout_s: float) -> str:
    """Send the signal to a process and return what it then appends to its file of stacks.

    A folder from elsewhere can name any process; only that of the run writes into the file.
    """
    if not is_written_by(process, os.fstat(file.fileno())):
        return "no stacks: the process is not of this run, it does not write into this folder"
    file.seek(0, os.SEEK_END)
    text = b""
    deadline_s = time.monotonic() + timeout_s
    os.kill(process.pid, SIGNAL)
    while time.monotonic() < deadline_s and len(text) < MAX_BYTES:
        await asyncio.sleep(POLL_S)
        text += file.read(MAX_BYTES - len(text))
        if text.endswith(END.encode()):
            return replace_controls(text.decode(errors="replace")).removesuffix(END)

    if text:
        # `faulthandler` wrote the threads, but the main thread never came to its tasks.
        note = "no stacks of tasks: the main thread does not run Python"
        if len(text) >= MAX_BYTES:
            note = "cut off"
        return f"{replace_controls(text.decode(errors='replace'))}({note})\n"
    return (
        f"no stacks within {timeout_s:g} s: the process is {read_kernel_state(process) or 'dead'}"
    )


# Reports of all processes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReport:
    """Open spans and stacks of one process, as texts."""

    role: str
    name: str
    spans: str
    stacks: str


async def collect_reports(
    states: Iterable[ProcessState],
    logs: Path,
    *,
    request: Callable[[ProcessState, Path], Awaitable[str]] = request_stacks,
) -> list[ProcessReport]:
    """Return the reports of processes, all of which are asked at the same time.

    Args:
        request: returns the stacks of one process, by default only of this machine.
    """
    states = list(states)
    # At the same time: each process that hangs is waited for until its timeout.
    stacks = await asyncio.gather(*(request(state, logs) for state in states))
    reports = []
    for state, text in zip(states, stacks, strict=True):
        report = ProcessReport(
            role=state.role, name=state.name, spans=state.describe(), stacks=text
        )
        reports.append(report)
    return reports


def format_reports(reports: Iterable[ProcessReport]) -> str:
    """Return the full reports, each under a heading."""
    texts = [f"==== {each.name}: {each.spans}\n{each.stacks.rstrip()}\n" for each in reports]
    return "\n".join(texts)


def write_reports(reports: Iterable[ProcessReport], logs: Path, *, title: str) -> Path | None:
    """Write the full reports as logs/stacks-<n>.txt; return None if the file cannot be written."""
    # The run may be resumed in this folder: earlier reports stay.
    numbers = itertools.count(1)
    file = logs / f"stacks-{next(numbers)}.txt"
    while file.exists():
        file = logs / f"stacks-{next(numbers)}.txt"
    try:
        file.write_text(f"{title}\n\n{format_reports(reports)}")
    except OSError:
        return None
    return file


def format_excerpts(reports: Sequence[ProcessReport], file: Path | None) -> str:
    """Return the lines that follow an error's message: a few for each process."""
    lines = []
    for report in reports[:MAX_REPORTED]:
        lines.append(f"  {report.name}: {report.spans}")
        lines += [f"    {line}" for line in extract_busy_lines(report.stacks)]
    if len(reports) > MAX_REPORTED:
        lines.append(f"  and {len(reports) - MAX_REPORTED} more processes")
    if file is not None:
        lines.append(f"  all stacks: {file}")
    return "\n".join(lines)


def extract_busy_lines(text: str) -> list[str]:
    """Return a line for each stack with our code, threads before tasks.

    The lines of a text without stacks, which says why there are none, are returned as they are.
    """
    stacks = re.split(rf"^(.*) {re.escape(ORDER)}\n", text, flags=re.MULTILINE)
    if len(stacks) == 1:
        return [line for line in text.splitlines() if line.strip()]

    threads, tasks = [], []
    for title, frames in zip(stacks[1::2], stacks[2::2], strict=True):
        calls = _select_calls(frames)
        if not calls:
            continue
        if title.startswith("Task "):
            tasks.append(f"task at {' < '.join(calls)}")
        else:
            threads.append(f"thread at {' < '.join(calls)}")
    lines = [*threads, *tasks]

    if not lines:
        return ["no thread is busy"]
    num_more = len(lines) - MAX_STACKS
    return [*lines[:MAX_STACKS], f"and {num_more} more"] if num_more > 0 else lines


def _select_calls(frames: str) -> list[str]:
    """Return place and function of the innermost frames of our code."""
    calls = []
    for line in frames.splitlines():
        match = _FRAME.match(line)
        if match is not None and not _NOT_OURS.search(match["file"]):
            file = match["file"].removeprefix(ROOT)
            calls.append(f"{file}:{match['line']} {match['function']}")
    return calls[:MAX_FRAMES]
