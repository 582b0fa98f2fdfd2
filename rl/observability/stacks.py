"""Where a process is in its code: the stacks of its threads and of its asyncio tasks, asked for by a signal.

    catch_signal()                                     # in the main thread, before anybody may ask
    write_stacks_to(logs / "state" / "trainer-0.stacks")
    ...
    text = await ask(state, folder)                    # in any process of the same machine

The threads' stacks are written by the signal's handler itself (`faulthandler`), also where the process is
stuck in native code, or nobody gets the interpreter's lock; those of the tasks as soon as the main thread
runs Python.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from rl.observability.process_state import ProcessState
from rl.process_id import catches, is_alive, kernel_state

SIGNAL = signal.SIGUSR1
ASK_S = 2.0
"""For a process to write its stacks; on a busy machine it takes some 10 ms."""
LOOK_EVERY_S = 0.02
END = "-- end of the stacks --\n"
ORDER = "(most recent call first):"
"""As `faulthandler` says it, so that both kinds of stacks read alike."""

_file: BinaryIO | None = None


def catch_signal() -> None:
    """From now on being asked does not end this process; in its main thread, elsewhere without effect."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _on_signal)


def write_stacks_to(file: Path) -> None:
    """From now on this is where the stacks are written when somebody asks for them."""
    global _file
    file.parent.mkdir(parents=True, exist_ok=True)
    stop_writing()
    # Appended to, so that it begins anew when whoever asks has made it empty.
    _file = file.open("ab", buffering=0)
    # A handler that is not there must not be gone on to: without one the signal ends the process.
    chain = signal.getsignal(SIGNAL) is _on_signal
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=chain)


def stop_writing() -> None:
    """Being asked has no effect any more."""
    global _file
    faulthandler.unregister(SIGNAL)
    if _file is not None:
        _file.close()
        _file = None


async def ask(state: ProcessState, folder: Path, *, timeout_s: float = ASK_S) -> str:
    """The stacks of a process of this machine, or one line that says why there are none.

    Args:
        folder: the one that `state` was read from.
    """
    if not state.is_here:
        return f"no stacks: it runs on {state.host}"
    if not is_alive(state.process):
        return "no stacks: the process is dead"
    doing = kernel_state(state.process)
    if doing is not None and "stopped" in doing:
        return f"no stacks: the process {doing}"
    if not catches(state.process, SIGNAL):
        return "no stacks: the process does not listen yet"
    file = folder / f"{state.role}-{state.rank}.stacks"
    try:
        return await _ask(state, file, deadline=time.monotonic() + timeout_s) or (
            f"no stacks within {timeout_s:g} s: the process {kernel_state(state.process) or 'is dead'}"
        )
    except OSError as error:
        return f"no stacks: {error}"


async def _ask(state: ProcessState, file: Path, *, deadline: float) -> str:
    """What it wrote until the deadline."""
    with file.open("r+b") as stacks:
        while not _locked(stacks):  # Somebody else is asking.
            if time.monotonic() > deadline:
                return ""
            await asyncio.sleep(LOOK_EVERY_S)
        stacks.truncate(0)
        os.kill(state.process.pid, SIGNAL)
        while True:
            text = os.pread(stacks.fileno(), os.fstat(stacks.fileno()).st_size, 0).decode(errors="replace")
            if text.endswith(END):
                return text.removesuffix(END)
            if time.monotonic() > deadline:
                return text and f"{text}(no stacks of tasks: the main thread does not run Python)\n"
            await asyncio.sleep(LOOK_EVERY_S)


def _locked(stacks: BinaryIO) -> bool:
    try:
        fcntl.flock(stacks, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    """In the main thread, between two instructions of whatever it does."""
    if _file is None:
        return
    try:
        text = "".join(f"\n{block}\n" for block in task_stacks())
        _file.write(f"{text}{END}".encode())
    except Exception as error:  # noqa: BLE001  (it must not come up in the middle of other code)
        os.write(2, f"stacks of tasks: {error!r}\n".encode())


def task_stacks() -> list[str]:
    """Where each asyncio task of this process waits, in whatever event loop; equal ones are told once."""
    at: dict[str, list[str]] = {}
    for task in _all_tasks():
        if not task.done():
            at.setdefault("\n".join(_frames(task.get_coro())), []).append(task.get_name())
    return [
        f"Task {names[0]}{f' and {len(names) - 1} more at the same place' if len(names) > 1 else ''} "
        f"{ORDER}\n{frames}"
        for frames, names in at.items()
        if frames
    ]


def _all_tasks() -> Iterable[asyncio.Task[Any]]:
    """`asyncio.all_tasks` lists those of one event loop, which has to be known."""
    found: list[asyncio.Task[Any]] = []
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):  # By the version of Python.
        found += list(getattr(asyncio.tasks, name, ()))
    return dict.fromkeys(found)


def _frames(coroutine: Any) -> list[str]:
    """From what it waits in, to where it began."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames[::-1]
