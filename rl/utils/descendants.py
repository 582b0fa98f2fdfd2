"""Processes that end with all of their descendants, whatever these do (Linux).

    guard (a subreaper) -> worker -> processes that the worker's code starts

A process whose parent dies belongs to its nearest ancestor that is a subreaper, also if it made a
session of its own. So everything that the worker's code starts stays below the guard, which finds
and ends it. The guard waits for events only, hence it acts even where the worker hangs in C code or
was killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import NoReturn

import psutil

from rl.utils.compat import exit_at_once

END_S = 5.0
"""Longest time in which killed processes must be gone; only one in an uninterruptible call takes
longer.
"""
_POLL_S = 0.005
_SHORT_POLL_S = 0.001
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_guarded(
    work: Callable[[], None],
    *,
    release: Callable[[], None],
    clean_up: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run `work` in a forked child, and end with it all that it has started.

    The child is ended when the parent ends or sends SIGTERM. Called in the main thread of a process
    that multiprocessing has spawned for this, which ends with the child's exit code. `release`
    frees in the guard what only the child needs, such as its end of a pipe; `clean_up` is called
    there once all processes are gone, however they ended.

    SIGTERM of anybody but the parent has no effect on both: a scheduler sends it to every process
    of a run.
    """
    _Guard().run(work, release=release, clean_up=clean_up)


def adopt_orphans() -> None:
    """Make this process a subreaper: the parent of all below it that lose theirs."""
    _set_option(_PR_SET_CHILD_SUBREAPER, 1)


def is_killed_with(parent: int) -> bool:
    """Have this process killed when its parent ends; return False if that has ended before."""
    _set_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def end_children(*, keep: Collection[int] = ()) -> bool:
    """Kill the children of this process, a subreaper, and all below them, and forget them.

    Only children are killed, whose pids nobody else gets before this process has forgotten them;
    each leaves its own children to this process. No other thread may wait for children.

    Args:
        keep: pids of children that stay, with all below them.

    Returns:
        False if some are left after `END_S`.
    """
    until = time.monotonic() + END_S
    while living := [pid for pid in list_children() if pid not in keep]:
        if time.monotonic() > until:
            return False
        for pid in living:
            # Another user's program (setuid) may refuse, and is asked again.
            with suppress(PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SHORT_POLL_S)
        for pid in living:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return True


def list_children() -> list[int]:
    """Return the pids of this process's children, zombies included."""
    # Otherwise a process without children would look at all of the machine.
    if not _has_children():
        return []
    pids: list[int] = []
    # Not by pathlib, which compiles a pattern first: a guard lives for some milliseconds.
    for thread in os.listdir("/proc/self/task"):
        # A thread that has ended, or a kernel without the file.
        with suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as file:
            pids += [int(pid) for pid in file.read().split()]
    # Kernels without CONFIG_PROC_CHILDREN lack the files.
    return pids or [child.pid for child in psutil.Process().children()]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _Guard:
    """Process between a parent and its worker, which ends the worker and all that it started."""

    def __init__(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        self._parent = parent.pid
        self._worker = 0
        self._statuses: dict[int, int] = {}
        """Wait statuses of the worker, and of orphans that ended before its pid was known."""

    def run(
        self,
        work: Callable[[], None],
        *,
        release: Callable[[], None],
        clean_up: Callable[[], None],
    ) -> NoReturn:
        try:
            # `_await_request` takes SIGTERM.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            # A terminal sends these to all of its processes. The parent decides what they mean.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, self._forget_children)
            adopt_orphans()
            guard = os.getpid()
            self._worker = os.fork()
            if self._worker == 0:
                _run_worker(work, guard=guard)
            release()
            self._wait()
        except BaseException:  # noqa: BLE001
            # Reported here, as nobody is above.
            traceback.print_exc()
            self._statuses[self._worker] = 1 << 8
        finally:
            _end_descendants()
            clean_up()
            _end_like(self._statuses.get(self._worker, 0))

    def _wait(self) -> None:
        """Wait until the worker or the parent has ended, or the parent asks for the end."""
        request, ask = os.pipe()
        threading.Thread(target=self._await_request, args=(ask,), daemon=True).start()
        # One of them may have ended already.
        with suppress(ProcessLookupError):
            ends = [os.pidfd_open(self._worker), os.pidfd_open(self._parent), request]
            # Otherwise the parent had ended, and its pid may be another process's by now.
            if os.getppid() == self._parent:
                wait(ends)

    def _await_request(self, ask: int) -> None:
        """Close the pipe at a SIGTERM of the parent."""
        # In a thread with `sigwaitinfo`, as a handler is not told the sender of a signal.
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != self._parent:
            pass
        os.close(ask)

    def _forget_children(self, *_: object) -> None:
        """Forget children that have ended, which are zombies until then."""
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                # 0: the fork has not returned, and this may be the worker.
                if self._worker in (0, pid):
                    self._statuses[pid] = status
                pid, status = os.waitpid(-1, os.WNOHANG)


def _run_worker(work: Callable[[], None], *, guard: int) -> NoReturn:
    """Run `work` in the worker, which dies with the guard."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        # What the worker starts ends by SIGTERM as usual: a pool ends its processes so, and a
        # command gets no handlers.
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The guard may have died before the option was set.
        if is_killed_with(guard):
            work()
            code = 0
    except BaseException:  # noqa: BLE001  (reported here: nobody is above)
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        exit_at_once(code)


def _end_descendants() -> None:
    """Kill all descendants and wait until they are gone.

    A killed process leaves its children to the guard, so they are looked up again and again.
    """
    until = time.monotonic() + END_S
    # Zombies do not count, which `_forget_children` forgets at once. The kernel is asked, as a list
    # may lack a process whose parent ends while it is read.
    while _has_children() and time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_S)


def _end_like(status: int) -> NoReturn:
    """End this process with the exit code, or by the signal, of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # SIGKILL has no handler. A core of the guard would tell nothing about the worker's end.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    exit_at_once(abs(code))


def _set_option(option: int, value: int) -> None:
    """Set an option of this process by prctl; OSError where the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl option {option}: {os.strerror(number)}")
