"""Processes of this machine (Linux): identity, signals, memory, compute threads, random state."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""
ROLE_VARIABLE = "RELAY_ROLE"
"""Variable that every process of an actor has, with the name of its role."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Unique identity of a process: pids are reused, a pid with its start time is not.

    The start time is in clock ticks since boot. psutil's `create_time` is in seconds of the wall
    clock, so two processes disagree about it once the clock has been set.
    """

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this pid now, or None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def get_pid_namespace() -> int | None:
    """Return the number of the namespace in which pids count for this process.

    A container has a namespace of its own.
    """
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def is_alive(process: ProcessId) -> bool:
    """Return whether the process runs; a zombie does not."""
    return identify(process.pid) == process


def kill(process: ProcessId) -> None:
    """Send SIGKILL, unless the process is gone and its pid is unused or reused."""
    if is_alive(process):
        os.kill(process.pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return a name such as SIGKILL; for a signal without a name its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_kernel_state(process: ProcessId) -> str | None:
    """Return the scheduler's state of a process, such as "sleeping"; None if it is dead."""
    with suppress(psutil.Error):
        state = psutil.Process(process.pid).status()
        # Looked up afterwards, as the state may be of another process that got the pid.
        return state if is_alive(process) else None
    return None


def is_signal_caught(process: ProcessId, number: int) -> bool:
    """Return True if the process has a handler for this signal."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A mask with a bit for each signal, from 1 on.
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1) and is_alive(process)


def is_written_by(process: ProcessId, file: os.stat_result) -> bool:
    """Return whether the process has this file open for writing.

    Raises PermissionError for a process of another user.
    """
    folder = Path(f"/proc/{process.pid}")
    try:
        descriptors = os.listdir(folder / "fd")
    except FileNotFoundError:
        return False
    for descriptor in descriptors:
        # The process may have closed it meanwhile.
        with suppress(OSError):
            if os.path.samestat(os.stat(folder / "fd" / descriptor), file):
                _, _, flags = (folder / "fdinfo" / descriptor).read_text().partition("flags:")
                if int(flags.split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return is_alive(process)
    return False


def leave_signals_to_controller() -> None:
    """Survive the signals that a terminal or a scheduler sends to every process of a run.

    Call it in the main thread. The controller acts on them: it finishes a step and saves, for which
    it needs the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A handler, as children would inherit that the signal is ignored.
            signal.signal(number, lambda *_: None)


def die_with_parent(parent: int) -> None:
    """Have this process stopped by SIGTERM when its parent ends.

    Strictly it is the thread that started it, which must therefore wait for it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have ended before.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


# Garbage collection


@contextmanager
def disable_collections() -> Iterator[None]:
    """Disable garbage collection during imports, and exempt what they made from later collections.

    Importing `actors.vllm.core` takes 7.1 s with collections and 5.4 s without (2026-11-22, 2 cores
    of an AMD EPYC, no GPU).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # triton reports objects that are still frozen at exit as leaked.
        atexit.register(gc.unfreeze)
        if enabled:
            gc.enable()


@contextmanager
def reduce_collections() -> Iterator[None]:
    """Collect garbage after 20,000 new objects instead of 700.

    For a process that holds the rollouts of a step, millions of objects without a cycle: Python's
    collections take a fifth of its time, and find nothing.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


# Compute threads and random states


_counting = threading.Lock()


def use_threads(count: int) -> None:
    """Run the PyTorch kernels of the calling thread on `count` threads.

    Other threads keep their counts. OpenMP keeps a pool of threads for every thread that has
    started a parallel kernel. As soon as the pools of a process together have more threads than
    there are cores, idle threads sleep instead of spinning, and each small kernel waits for them to
    wake: matrix products of 128 x 128 x 512 take 1.7 times as long. So only the computing thread of
    a process should have a pool; a count of 1 creates none.
    """
    import torch

    with _counting:
        torch.set_num_threads(count)
        # PyTorch also stores the last count set by any thread, and a thread adopts it at its first
        # parallel operation. Reading the count makes the calling thread adopt its own.
        torch.get_num_threads()


def seed_everything(seed: int, *, offset: int = 0, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and PyTorch's generators, on every device, with `seed + offset`.

    Args:
        offset: per-rank offset; 0 on ranks that must draw the same numbers.
        deterministic: forbid kernels whose result depends on scheduling; slower, and an operation
            without a deterministic kernel raises RuntimeError.
    """
    import numpy as np
    import torch

    random.seed(seed + offset)
    np.random.seed((seed + offset) % 2**32)
    torch.manual_seed(seed + offset)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def process_states() -> dict[str, Any]:
    """Return the random states of Python, numpy and PyTorch, if these are imported."""
    states: dict[str, Any] = {"python": random.getstate()}
    # A thread may be importing one of them: then no random number has been drawn from it yet.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    with suppress(AttributeError):
        if numpy is not None:
            states["numpy"] = numpy.random.get_state()
    with suppress(AttributeError):
        if torch is not None:
            states["torch"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_process_states(states: Mapping[str, Any]) -> None:
    """Set the states that `process_states` returned, for the libraries that are imported."""
    random.setstate(states["python"])
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
    if torch is not None:
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["cuda"])


END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's end of the run, and the end of its terminal or ssh session."""
WAKE_UP = signal.SIGRTMIN + 6
"""Signal that nobody sends."""
REPEAT_S = 0.1
"""Time within which the same signal counts once: `timeout` sends it to the process and to its
group.
"""


@contextmanager
def handle_end_signals(
    on_signal: Callable[[int], None], *, loop: asyncio.AbstractEventLoop
) -> Iterator[None]:
    """Handle `END_SIGNALS` in this block, if this is the main thread.

    Signals that were ignored before stay so: SIGINT in a shell's background job, SIGHUP under
    nohup. The end of a terminal counts once, and not after Ctrl-C, because the kernel and the shell
    both tell it, and nobody is there to ask for a faster end.
    """
    before: dict[int, Any] = {}
    # Python sets handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    for end_signal in END_SIGNALS if is_main else ():
        handler = signal.getsignal(end_signal)
        if handler is not signal.SIG_IGN:
            before[end_signal] = handler
    last: tuple[int, float] | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now_s, earlier = time.monotonic(), last
        last = (number, now_s)
        if earlier is not None:
            is_repeated = earlier[0] == number and now_s - earlier[1] < REPEAT_S
            if number == signal.SIGHUP or is_repeated:
                return
        on_signal(number)

    for number in before:
        signal.signal(number, handle)
    if before:
        # With any handler of its own the loop wakes up for every signal, also for one that the
        # kernel gave to another thread of this process.
        loop.add_signal_handler(WAKE_UP, lambda: None)
    try:
        yield
    finally:
        loop.remove_signal_handler(WAKE_UP)
        for number, handler in before.items():
            signal.signal(number, handler)


# Memory


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""glibc's numbers of options of `mallopt`."""
NUM_KERNELS = "128"
"""Compiled products that oneDNN keeps, of about 1 MB each: several times those of a forward and
backward. Its default is 1024, and each number of rows needs its own."""


def keep_freed_memory() -> None:
    """Keep the memory that this process frees for its next tensors (glibc only).

    Call it before any product. What lives longer leaves holes in it, oneDNN's kernels above all:
    call `give_back_freed_memory` now and then.

    By default glibc returns large blocks to the kernel, which clears every page of the next tensor
    as it is first written: a product with a result of 55 MB took 55 ms, of which the product itself
    was 13 (2 cores of an Intel Xeon with AMX, 2026-11-26).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", NUM_KERNELS)
    _set_malloc(_MMAP_MAX, 0)
    _set_malloc(_TRIM_THRESHOLD, -1)


def share_freed_memory() -> None:
    """Let threads take what other threads have freed (glibc only). Call it before they start.

    By default glibc gives threads up to eight memories a core, and what lies free in one of them is
    of no use to the threads of another. A Tinker server grew by 140 to 210 MB in 12,000 requests of
    `make attack`, and grows by 15 with one memory (2 cores, 2026-12-01).
    """
    _set_malloc(_ARENA_MAX, 1)


def _set_malloc(option: int, value: int) -> None:
    # Other C libraries lack it.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def give_back_freed_memory() -> None:
    """Return the pages that hold nothing to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Memory that this process has freed and keeps, until there is much of it.

    What is given back has to be cleared by the kernel when it is next written.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._resident_bytes = _read_resident_bytes()
        """After the latest time that it was given back."""

    def give_back_if_much(self) -> None:
        """Give it back if this process has grown by `most_bytes` since the last time."""
        # The allocator's own count of free bytes includes those that were given back already.
        if _read_resident_bytes() - self._resident_bytes >= self._most_bytes:
            give_back_freed_memory()
            self._resident_bytes = _read_resident_bytes()


def _read_resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
