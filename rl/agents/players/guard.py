"""Guard of one play: starts the agent, watches it, and ends all that it has started.

A fork of the zygote (`rl.agents.players.zygote`), and a subreaper: also daemons that the agent
leaves belong to it. It runs no foreign code, reads the output so that the agent is never blocked
by the owner, nor the owner by the agent, and answers on the link of the play:

    from the owner   the length of the request in 8 bytes, the pickled AgentSpec;
                     the end of this direction asks for the end of the play
    to the owner     BEGUN; then RESULT, 8 bytes of length, the pickled AgentResult,
                     or LOST, 8 bytes of length, the reason as a text; the end of the stream
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl.agents.players.folder import PlayFolder
from rl.agents.players.function import MAX_VALUE_BYTES, run_function
from rl.agents.players.oom import let_children_be_killed_first
from rl.agents.players.plays import NOT_FOUND, NOT_STARTED, AgentResult, AgentSpec, PlayEnd
from rl.utils.descendants import END_S, adopt_orphans, end_children, list_children
from rl.utils.nesting import exceeds_depth

BEGUN, RESULT, LOST = b"B", b"R", b"L"
LENGTH = struct.Struct("<Q")
LINK_S = 60.0
"""Longest wait for the owner to send more of a request, or to take more of a result."""
KEPT_OUTPUT_BYTES = 64 * 1024
"""Most bytes of the output in a result."""
CHUNK_BYTES = 64 * 1024
LEAVE_S = 0.5
"""Time after the agent's end in which processes that it has left may end by themselves."""
LEFT_POLL_S = 0.005
LOOK_S = 1.0
"""Shortest time between two looks at the folder."""
LOOK_SHARE = 20
"""Least time between two looks, as a multiple of what the last took: at most 5% of a core."""


def frame(kind: bytes, content: bytes) -> bytes:
    """Return a message of the given kind to the owner."""
    return kind + LENGTH.pack(len(content)) + content


def guard_play(
    link: socket.socket,
    *,
    folder: str,
    function: Callable[[Any], Any] | None,
    base_env: Mapping[str, str],
    zygote: int,
) -> None:
    """Play what is requested on the link; runs in a process of its own, a child of the zygote."""
    _prepare_signals()
    # The process lives too short for cycles of garbage, and a search would copy inherited pages.
    gc.disable()
    adopt_orphans()
    watched = os.pidfd_open(zygote)
    # It may have ended before, and its pid may be another process's.
    if os.getppid() != zygote:
        return
    link.settimeout(LINK_S)
    link.sendall(BEGUN)
    request = _receive_request(link)
    if request is None:
        return
    place = PlayFolder(folder)
    play = _Play(request, link=link, zygote=watched, folder=place)
    try:
        result = play.run(function, base_env=base_env)
    except _ZygoteEndedError:
        # Without a result: the owner is told that the play was lost.
        return
    finally:
        # After an error in the guard as well, whose end the zygote tells the owner.
        end_children()
        os.chdir("/")
        place.remove()
    # The owner is gone, or waits no more.
    with suppress(OSError):
        link.sendall(frame(RESULT, pickle.dumps(result)))


def _prepare_signals() -> None:
    """Survive what a terminal or a scheduler sends to all processes of a run.

    By handlers: a command would inherit that a signal is ignored.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _receive_request(link: socket.socket) -> AgentSpec | None:
    """Return the request; None if the owner has gone or ended the play."""
    with suppress(EOFError, OSError):
        (length,) = LENGTH.unpack(_receive(link, LENGTH.size))
        spec: AgentSpec = pickle.loads(_receive(link, length))
        return spec
    return None


def _receive(link: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = link.recv(min(length - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class _ZygoteEndedError(Exception):
    """The zygote ended during the play, and this guard is about to be killed."""


class _Play:
    """One agent with its output and its folder."""

    def __init__(
        self, spec: AgentSpec, *, link: socket.socket, zygote: int, folder: PlayFolder
    ) -> None:
        self._spec = spec
        self._link = link
        self._zygote = zygote
        """Descriptor of the zygote's process."""
        self._folder = folder
        self._reading, self._writing = os.pipe()
        """Ends of the pipe of stdout and stderr."""
        os.set_blocking(self._reading, False)
        self._value = os.memfd_create("value")
        """File without a path, for the JSON text of what a function returns."""
        self._process: subprocess.Popen[bytes] | None = None
        """Process of a command, held because Python would wait for one that nobody holds."""
        self._output = bytearray()
        """Last part of the output."""
        self._num_bytes = 0
        """Length of the whole output."""
        self._num_left = 0
        """Processes that the agent has left."""

    def run(
        self, function: Callable[[Any], Any] | None, *, base_env: Mapping[str, str]
    ) -> AgentResult:
        """Return what became of the agent, after the end of all that it has started."""
        start_s = time.monotonic()
        stopped: PlayEnd | None = None
        try:
            pid = self._start(function, base_env=base_env)
        except (OSError, UnicodeEncodeError) as error:
            self._add_output(f"relay: the agent cannot be started: {error}\n".encode())
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        else:
            end = os.pidfd_open(pid)
            stopped = self._watch(end, until_s=start_s + self._spec.time_limit_s)
            if stopped is None:
                self._num_left = _count_left(pid)
            status = _end_agent(pid, end=end)
            end_children()
            # A writer that nothing could end may hold the pipe, which is then empty, not ended.
            while self._read_output():
                pass
        return self._make_result(status, stopped=stopped, wall_s=time.monotonic() - start_s)

    def _start(self, function: Callable[[Any], Any] | None, *, base_env: Mapping[str, str]) -> int:
        """Start the agent in the working folder; return its pid."""
        spec = self._spec
        os.umask(0o022)
        self._folder.make(spec.files)
        os.chdir(self._folder.work)
        variables = self._folder.list_variables(keep_home=spec.keep_home)
        env = {**variables, **spec.env}
        # A single file cannot fill the disk between two looks at the folder. Limits of memory or
        # of processes would break Node and Go.
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, spec.max_folder_bytes),
        ):
            hard = resource.getrlimit(limit)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))

        if spec.command is not None:
            pid = self._start_command(spec.command, env={**base_env, **env})
        else:
            # It keeps what its module has set.
            assert function is not None
            pid = self._fork_function(function, env=env)
        os.close(self._writing)
        return pid

    def _start_command(self, command: Sequence[str], *, env: Mapping[str, str]) -> int:
        with let_children_be_killed_first():
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._writing,
                stderr=self._writing,
                start_new_session=True,
            )
        return self._process.pid

    def _fork_function(self, function: Callable[[Any], Any], *, env: Mapping[str, str]) -> int:
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            # The end of the link has to be noticed by the owner, whatever the agent does.
            for descriptor in (self._link.detach(), self._zygote, self._reading):
                os.close(descriptor)
            run_function(
                function,
                self._spec.argument,
                env=env,
                output=self._writing,
                value=self._value,
                guard=guard,
            )
        return pid

    def _watch(self, end: int, *, until_s: float) -> PlayEnd | None:
        """Wait until the agent ends or has to be ended; return the reason of the second.

        Raises _ZygoteEndedError.
        """
        spec, look_s = self._spec, time.monotonic() + LOOK_S
        poll = select.poll()
        for descriptor in (end, self._reading, self._link.fileno(), self._zygote):
            poll.register(descriptor, select.POLLIN)
        while True:
            now_s = time.monotonic()
            if now_s >= until_s:
                return "time limit"
            if now_s >= look_s:
                if self._is_folder_full():
                    return "folder limit"
                took_s = time.monotonic() - now_s
                look_s = time.monotonic() + max(LOOK_S, LOOK_SHARE * took_s)
            wait_s = max(0.0, min(until_s, look_s) - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(1000 * wait_s + 1)}
            if self._reading in ready and not self._read_output():
                # Closed by the agent and all that it has started.
                poll.unregister(self._reading)
            if self._num_bytes > spec.max_output_bytes:
                return "output limit"
            if end in ready:
                return None
            if self._zygote in ready:
                raise _ZygoteEndedError
            # The owner sends nothing more: this is the end of its direction.
            if self._link.fileno() in ready:
                return "ended"

    def _is_folder_full(self) -> bool:
        spec = self._spec
        return self._folder.exceeds(max_bytes=spec.max_folder_bytes, max_files=spec.max_files)

    def _read_output(self) -> bool:
        """Read what is there of the output; return False if there was nothing."""
        try:
            data = os.read(self._reading, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._add_output(data)
        return bool(data)

    def _add_output(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._output += data
        # Not at each read, as the rest is copied.
        if len(self._output) > 4 * KEPT_OUTPUT_BYTES:
            del self._output[:-KEPT_OUTPUT_BYTES]

    def _make_result(self, status: int, *, stopped: PlayEnd | None, wall_s: float) -> AgentResult:
        is_over = self._num_bytes > self._spec.max_output_bytes
        if stopped is None and is_over:
            stopped = "output limit"
        elif stopped is None and (status == -signal.SIGXFSZ or self._is_folder_full()):
            stopped = "folder limit"
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        value = self._read_value() if stopped is None and status == 0 else None
        return AgentResult(
            reason=stopped or ("ok" if status == 0 else "error"),
            status=status,
            output=self._output[-KEPT_OUTPUT_BYTES:].decode(errors="replace"),
            value=value,
            files=self._folder.collect(self._spec.collect),
            num_left=self._num_left,
            wall_s=wall_s,
            cpu_s=used.ru_utime + used.ru_stime,
        )

    def _read_value(self) -> Any:
        """Return the value that the agent's function returned, or None without a readable one."""
        text = os.pread(self._value, MAX_VALUE_BYTES, 0)
        if not text:
            return None
        # The agent holds the file too, and may have written anything.
        try:
            value = json.loads(text)
            if exceeds_depth(value):
                raise ValueError("it is nested too deeply")
        except (ValueError, RecursionError) as error:
            self._output += f"relay: the value in the agent's file is not kept ({error})\n".encode()
            return None
        return value


def _count_left(agent: int) -> int:
    """Return how many processes an agent has left at its end; those that end soon do not count."""
    until_s = time.monotonic() + LEAVE_S
    while True:
        left = [pid for pid in list_children() if pid != agent and not _is_over(pid)]
        if not left or time.monotonic() > until_s:
            return len(left)
        time.sleep(LEFT_POLL_S)


def _is_over(pid: int) -> bool:
    """Return whether a child has ended, and forget it then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end_agent(pid: int, *, end: int) -> int:
    """Kill the agent with its session, unless it has ended; return its exit status."""
    # Not forgotten yet, the agent still holds its pid, so that no other group can have it.
    for send in (os.killpg, os.kill):
        # A function that is killed at once may not have its session yet.
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    # Only one in an uninterruptible call takes longer.
    if not poll.poll(1000 * END_S):
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
