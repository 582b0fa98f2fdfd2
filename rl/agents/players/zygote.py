"""The process that all agents of an owner are forks of.

    owner -> guard -> zygote -> guard of a play -> agent -> processes that the agent starts
                             -> guard of a play -> ...

The zygote imports the agents' function once and runs no foreign code afterwards: an agent is a copy
of a process that has just imported it. `rl.utils.descendants` ends all of them with the owner, and
removes their folders.

    from the owner   b"play 17" with the end of a socket (`rl.agents.players.guard`);
                     b"kill 17" for a guard that does not answer
    to the owner     once, a pickled ZygoteReport
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from rl.agents.players.folder import remove_folder
from rl.agents.players.guard import LOST, frame, guard_play
from rl.agents.players.loading import load_agent_function
from rl.agents.players.plays import EPISODE_VARIABLES
from rl.utils.compat import exit_at_once
from rl.utils.descendants import adopt_orphans, end_children, list_children, run_guarded
from rl.utils.printing import describe_value, truncate
from rl.utils.secrets import find_secrets

PLAY, KILL = b"play", b"kill"
MAX_REQUEST_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ZygoteReport:
    """State of the zygote after its imports."""

    problem: str | None = None
    """Reason why the function cannot be had."""
    root: str = ""
    """Folder of the plays' folders."""
    threads: tuple[str, ...] = ()
    """Names of the threads that the function's module has started, and which agents lack."""


def run_zygote(link: socket.socket, function: str | None, keep_env: Collection[str]) -> None:
    """Serve plays in a child of this process, and end it with all of its descendants."""
    # The owner may ask for the end at once; `run_guarded` takes the signal and removes the folder.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    root = tempfile.mkdtemp(prefix="relay-agents-")
    work = partial(_serve, link, function=function, keep_env=keep_env, root=root)
    run_guarded(work, release=link.close, clean_up=partial(remove_folder, root))


def _serve(
    link: socket.socket, *, function: str | None, keep_env: Collection[str], root: str
) -> None:
    # Before the import, as whatever it starts has this environment.
    for name in find_secrets(os.environ, keep=keep_env):
        del os.environ[name]
    # A client that the import makes would have another model than the episode's.
    for name in EPISODE_VARIABLES:
        os.environ.pop(name, None)
    # Agents may start processes, as any program may: a daemon may not, and a spawned process would
    # spawn its children.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    base_env = dict(os.environ)
    try:
        loaded = None if function is None else _load(function)
    except BaseException as error:  # noqa: BLE001  (a module may also call sys.exit)
        problem = str(error) if isinstance(error, ValueError) else describe_value(error)
        _report(link, ZygoteReport(problem=truncate(problem)))
        return
    threads = [thread.name for thread in threading.enumerate()][1:]
    zygote = _Zygote(link, function=loaded, base_env=base_env, root=root)
    # What the imports have made is shared with all agents, as long as no collection writes to it.
    gc.collect()
    gc.freeze()
    _report(link, ZygoteReport(root=root, threads=tuple(threads[:10])))
    zygote.serve()


def _report(link: socket.socket, report: ZygoteReport) -> None:
    with suppress(OSError):  # the owner has gone
        link.send(pickle.dumps(report))


def _load(place: str) -> Callable[[Any], Any]:
    # Otherwise each agent would import the class of the problem that it is given, and what every
    # client needs for the name of a host.
    for module in ("rl.types", "encodings.idna"):
        importlib.import_module(module)
    return load_agent_function(place)


class _Zygote:
    """Single-threaded server that forks the guards of plays, and forgets them when they end."""

    def __init__(
        self,
        link: socket.socket,
        *,
        function: Callable[[Any], Any] | None,
        base_env: dict[str, str],
        root: str,
    ) -> None:
        self._link = link
        self._function = function
        self._base_env = base_env
        self._root = root
        self._plays: dict[int, tuple[str, socket.socket]] = {}
        """Number and link of each play by the pid of its guard. The owner sees the end of the link
        only when the zygote has forgotten the guard."""
        # An agent may kill its guard, and leaves processes then.
        adopt_orphans()
        self._helpers = list_children()
        """Processes that the imports have started."""
        self._wake, wake = os.pipe()
        for descriptor in (self._wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._own = (self._wake, wake)

    def serve(self) -> None:
        """Play what the owner asks for, until its end of the link is closed."""
        poll = select.poll()
        for descriptor in (self._link.fileno(), self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            # Ended guards first: the owner may wait for one of them before it asks for more.
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._forget_children()
            if self._link.fileno() in ready and not self._answer():
                return

    def _answer(self) -> bool:
        """Do what the next request asks for; return False if there will be none."""
        request, descriptors, _, _ = socket.recv_fds(self._link, MAX_REQUEST_BYTES, 1)
        verb, _, number = request.partition(b" ")
        if verb == PLAY:
            (descriptor,) = descriptors
            self._play(number.decode(), socket.socket(fileno=descriptor))
        elif verb == KILL:
            for pid, (name, _) in self._plays.items():
                if name == number.decode():
                    os.kill(pid, signal.SIGKILL)
        return bool(request)

    def _play(self, number: str, link: socket.socket) -> None:
        # What is buffered would be written by both.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _tell_lost(link, f"no process could be started: {error.strerror}")
            return
        if pid == 0:
            self._become_guard(number, link, zygote=zygote)
        self._plays[pid] = (number, link)

    def _become_guard(self, number: str, link: socket.socket, *, zygote: int) -> NoReturn:
        status = 1
        try:
            self._link.close()
            for _, other in self._plays.values():
                other.close()
            signal.set_wakeup_fd(-1)
            for descriptor in self._own:
                os.close(descriptor)
            guard_play(
                link,
                folder=os.path.join(self._root, number),
                function=self._function,
                base_env=self._base_env,
                zygote=zygote,
            )
            status = 0
        except BaseException:  # noqa: BLE001  (reported here: nobody is above)
            traceback.print_exc()
        finally:
            exit_at_once(status)

    def _forget_children(self) -> None:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                # Otherwise one of a lost play, or of the imports.
                if pid in self._plays:
                    self._end_play(pid, os.waitstatus_to_exitcode(status))
                pid, status = os.waitpid(-1, os.WNOHANG)

    def _end_play(self, pid: int, status: int) -> None:
        number, link = self._plays.pop(pid)
        if status == 0:
            link.close()
            return
        end_children(keep={*self._plays, *self._helpers})
        remove_folder(os.path.join(self._root, number))
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        _tell_lost(link, f"the guard of the agent ended ({how}), perhaps by the agent: see stderr")


def _tell_lost(link: socket.socket, reason: str) -> None:
    with link, suppress(OSError):
        link.setblocking(False)
        link.send(frame(LOST, reason.encode()))
