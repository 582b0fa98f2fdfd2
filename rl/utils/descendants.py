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
from collections.abc import Callable
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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_guarded(work: Callable[[], None], *, release: Callable[[], None]) -> NoReturn:
    """Run `work` in a forked child until it ends, the parent ends or sends SIGTERM; then end all
    descendants.

    Called in the main thread of a process that multiprocessing has spawned for this, which ends
    with the child's exit code. `release` frees in the guard what only the child needs, such as its
    end of a pipe.

    SIGTERM of anybody but the parent has no effect on both: a scheduler sends it to every process
    of a run.
    """
    _Guard().run(work, release=release)


class _Guard:
    """The process between a parent and its worker, which ends the worker and all that it
    started.
    """

    def __init__(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        self._parent = parent.pid
        self._worker = 0
        self._statuses: dict[int, int] = {}
        """Wait statuses of the worker, and of orphans that ended before its pid was known."""

    def run(self, work: Callable[[], None], *, release: Callable[[], None]) -> NoReturn:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # `_hear` takes it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            # A terminal sends these to all of its processes. The parent decides what they mean.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, self._reap)
            _set_option(_PR_SET_CHILD_SUBREAPER, 1)
            guard = os.getpid()
            self._worker = os.fork()
            if self._worker == 0:
                _work(work, guard=guard)
            release()
            self._wait()
        except BaseException:  # noqa: BLE001  (reported here: nobody is above)
            traceback.print_exc()
            self._statuses[self._worker] = 1 << 8
        finally:
            _end_descendants()
            _end_like(self._statuses.get(self._worker, 0))

    def _wait(self) -> None:
        """Wait until the worker or the parent has ended, or the parent asks for the end."""
        asked, ask = os.pipe()
        threading.Thread(target=self._hear, args=(ask,), daemon=True).start()
        with suppress(ProcessLookupError):  # one of them has ended already
            ends = [os.pidfd_open(self._worker), os.pidfd_open(self._parent), asked]
            if os.getppid() == self._parent:  # and the pid is not yet another process's
                wait(ends)

    def _hear(self, ask: int) -> None:
        """Close the pipe at a SIGTERM of the parent; handlers are not told who has sent a
        signal.
        """
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != self._parent:
            pass
        os.close(ask)

    def _reap(self, *_: object) -> None:
        """Forget children that have ended, which are zombies until then."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if self._worker in (0, ended[0]):
                    self._statuses[ended[0]] = ended[1]


def _work(work: Callable[[], None], *, guard: int) -> NoReturn:
    """Run `work` in the worker, which dies with the guard."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        # What the worker starts ends by SIGTERM as usual: a pool ends its processes so, and a
        # command gets no handlers.
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _set_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:  # The guard may have died before the option was set.
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
    """Kill all descendants, also those that a killed one leaves behind, and wait until they are
    gone.
    """
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        left = psutil.Process().children(
            recursive=True
        )  # without zombies, which `_reap` forgets at once
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_S)


def _end_like(status: int) -> NoReturn:
    """End this process with the exit code, or by the signal, of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    exit_at_once(abs(code))


def _set_option(option: int, value: int) -> None:
    """Set an option of this process by prctl; OSError where the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl option {option}: {os.strerror(number)}")
