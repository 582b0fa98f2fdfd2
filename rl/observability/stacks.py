"""Stacks of the threads and asyncio tasks of another process of this machine, requested by a
signal.

    catch_signal()                             # in the main thread of the process, once
    write_stacks_to(logs, role="trainer", rank=0)
    ...
    text = await request_stacks(state, logs)   # in any process of the machine

`faulthandler` writes the threads' stacks in the signal handler itself, even if the process is stuck
in native code or in a deadlock on the interpreter's lock. The tasks' stacks follow as soon as the
main thread runs Python. `excerpt` picks the few lines that an error message has room for.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from rl.observability.spans import STATE_FOLDER, ProcessState
from rl.utils.files import open_regular
from rl.utils.printing import visible
from rl.utils.processes import ProcessId, catches, is_alive, kernel_state, writes_to

SIGNAL = signal.SIGUSR1
REQUEST_S = 2.0
"""Time a process has to write its stacks, which takes some 10 ms."""
POLL_S = 0.02
MAX_BYTES = 1 << 20
"""Bytes of one process's stacks that are read."""
END = "-- end of the stacks --\n"
ORDER = "(most recent call first):"
"""Words of `faulthandler`, used for tasks too."""

MAX_STACKS = 6
MAX_FRAMES = 4
"""Frames of each stack of an excerpt."""
ROOT = f"{Path(__file__).resolve().parent.parent.parent}/"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_NOT_OURS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.|<|/(process_main|threads|launch|interpreter)\.py$"
)
"""Files of Python, of packages, and of this project that are in the stacks of idle threads too."""

_file: BinaryIO | None = None


def catch_signal() -> None:
    """Handle the signal in this process. Call it in the main thread; elsewhere it has no effect."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _on_signal)


def write_stacks_to(logs: Path, *, role: str, rank: int) -> None:
    """Write the stacks of this process to the run's logs whenever they are requested."""
    global _file
    file = _stacks_file(logs, role=role, rank=rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    stop_writing_stacks()
    file.unlink(missing_ok=True)
    _file = file.open("ab", buffering=0)
    # Chaining to the default handler would end the process.
    chain = signal.getsignal(SIGNAL) is _on_signal
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=chain)


def stop_writing_stacks() -> None:
    """Ignore requests from now on."""
    global _file
    faulthandler.unregister(SIGNAL)
    if _file is not None:
        _file.close()
        _file = None


async def request_stacks(state: ProcessState, logs: Path, *, timeout_s: float = REQUEST_S) -> str:
    """Return the stacks of a process of this machine, or one line that says why there are none."""
    if not state.is_here:
        return f"no stacks: it runs on {state.place}"
    activity = kernel_state(state.process)
    if activity is None or not is_alive(state.process):
        return "no stacks: the process is dead"
    if "stop" in activity:
        return "no stacks: the process is stopped by a signal"
    if not catches(state.process, SIGNAL):
        return "no stacks: the process does not listen yet"
    try:
        with open_regular(_stacks_file(logs, role=state.role, rank=state.rank)) as file:
            return await _ask(state.process, file, timeout_s=timeout_s)
    except OSError as error:
        return f"no stacks: {error.strerror or error}"


async def _ask(process: ProcessId, file: BinaryIO, *, timeout_s: float) -> str:
    """Send the signal to a process and return what it then appends to its file of stacks.

    A folder from elsewhere can name any process; only that of the run writes into the file.
    """
    if not writes_to(process, os.fstat(file.fileno())):
        return "no stacks: the process is not of this run, it does not write into this folder"
    file.seek(0, os.SEEK_END)
    text = b""
    deadline_s = time.monotonic() + timeout_s
    os.kill(process.pid, SIGNAL)
    while time.monotonic() < deadline_s and len(text) < MAX_BYTES:
        await asyncio.sleep(POLL_S)
        text += file.read(MAX_BYTES - len(text))
        if text.endswith(END.encode()):
            return visible(text.decode(errors="replace")).removesuffix(END)
    if text:
        is_cut_off = len(text) >= MAX_BYTES
        note = (
            "cut off" if is_cut_off else "no stacks of tasks: the main thread does not run Python"
        )
        return f"{visible(text.decode(errors='replace'))}({note})\n"
    return f"no stacks within {timeout_s:g} s: the process is {kernel_state(process) or 'dead'}"


def _stacks_file(logs: Path, *, role: str, rank: int) -> Path:
    return logs / STATE_FOLDER / f"{role}-{rank}.stacks"


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Write the tasks' stacks, in the main thread between two instructions of other code."""
    if _file is None:
        return
    try:
        _file.write(f"{_task_stacks()}{END}".encode())
    except Exception as error:  # noqa: BLE001  (must not surface in the code that was interrupted)
        os.write(2, f"stacks of tasks: {error!r}\n".encode())


def _task_stacks() -> str:
    """Return the stacks of the unfinished asyncio tasks of all event loops; equal stacks are
    merged.
    """
    names_at: dict[str, list[str]] = {}
    for attribute in (
        "_all_tasks",
        "_scheduled_tasks",
        "_eager_tasks",
    ):  # depends on the version of Python
        for task in list(getattr(asyncio.tasks, attribute, ())):
            if not task.done() and (frames := _coroutine_frames(task.get_coro())):
                names_at.setdefault(frames, []).append(task.get_name())
    blocks = []
    for frames, names in names_at.items():
        more = f" and {len(names) - 1} more at the same place" if len(names) > 1 else ""
        blocks.append(f"\nTask {names[0]}{more} {ORDER}\n{frames}\n")
    return "".join(blocks)


def _coroutine_frames(coroutine: Any) -> str:
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


def excerpt(text: str) -> list[str]:
    """Return a line for each stack with our code, threads before tasks; text without stacks as it
    is.
    """
    stacks = re.split(rf"^(.*) {re.escape(ORDER)}\n", text, flags=re.MULTILINE)
    if len(stacks) == 1:
        return [line for line in text.splitlines() if line.strip()]
    lines = []
    for title, frames in zip(stacks[1::2], stacks[2::2], strict=True):
        matches = [match for line in frames.splitlines() if (match := _FRAME.match(line))]
        ours = [m for m in matches if not _NOT_OURS.search(m["file"])]
        if ours:
            calls = [
                f"{m['file'].removeprefix(ROOT)}:{m['line']} {m['function']}"
                for m in ours[:MAX_FRAMES]
            ]
            lines.append(
                f"{'task' if title.startswith('Task ') else 'thread'} at {' < '.join(calls)}"
            )
    if not lines:
        return ["no thread is busy"]
    lines.sort(key=lambda line: line.startswith("task"))
    return [
        *lines[:MAX_STACKS],
        *([f"and {len(lines) - MAX_STACKS} more"] if len(lines) > MAX_STACKS else []),
    ]
