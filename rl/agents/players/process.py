"""Agents in processes of their own: commands and Python functions that are foreign code.

An agent may crash, hang, end its process, start daemons, change its environment or fill its folder:
only its own play ends by that, and nothing of it stays behind. All agents are forks of one process
(`rl.agents.players.zygote`), which has imported the function once.

This side runs in an event loop that others need: it waits for sockets, and leaves the output, the
limits and the folders to the guard of each play (`rl.agents.players.guard`).

An agent is confined in no other way: it has the rights of the user who runs it, the network, and
all files. Linux only, for subreapers and descriptors of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import pickle
import shutil
import socket
import sys
from collections.abc import Collection
from multiprocessing.context import SpawnProcess
from types import ModuleType

from rl.agents.players.guard import BEGUN, LENGTH, LOST, RESULT
from rl.agents.players.plays import AgentResult, AgentSpec
from rl.agents.players.zygote import KILL, PLAY, ZygoteReport, run_zygote
from rl.utils.errors import RunError
from rl.utils.printing import describe_value
from rl.utils.processes import signal_name

logger = logging.getLogger(__name__)

IMPORT_S = 300.0
"""Time in which the function's module must be imported, unless it is given."""
NUM_STARTING = 4
"""Plays whose processes are started at the same time. One process forks them all: with 16, on 2
cores, 400 quick plays took as long, and the owner's event loop waited longer for a core. Hundreds
of requests would fill the zygote's socket."""
BEGIN_S = 60.0
"""Longest wait for the guard of a play to begin."""
ANSWER_S = 30.0
"""Time beyond its limit in which the end of a play must be told: its processes have to be killed
and its folder removed."""
END_S = 8.0
"""Time in which the guard of the zygote must end all processes."""
MAX_REPORT_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024


class AgentProcessLostError(Exception):
    """The process of all agents, or the guard of this one, ended during the play.

    The agent has been ended too. Another play can be started.
    """


class _NotBegunError(AgentProcessLostError):
    """The process of all agents ended before it started this one."""


class AgentProcess:
    """Plays agents in child processes; calls of `play` overlap.

    Example:
        agents = AgentProcess("my_agents:solve")
        await agents.start()
        result = await agents.play(AgentSpec(argument=problem, env={"OPENAI_BASE_URL": url}))
        await agents.close()
    """

    def __init__(
        self,
        function: str | None = None,
        *,
        import_timeout_s: float = IMPORT_S,
        keep_env: Collection[str] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            function: place of the function that specs without a command play, such as
                "my_agents:solve" or "agent.py:solve". Sync or async, of one argument.
            import_timeout_s: longest time for the process to start and to import the function's
                module.
            keep_env: names of variables that agents get although they look like secrets.

        Raises:
            ValueError: this is not Linux.
        """
        if sys.platform != "linux":
            raise ValueError(
                f"agents run on Linux only, not on {sys.platform}, which lacks subreapers and "
                "pidfd_open: what an agent leaves behind could not be ended there"
            )
        self._function = function
        self._import_timeout_s = import_timeout_s
        self._keep_env = tuple(keep_env)
        self.process: SpawnProcess | None = None
        """Guard of the zygote; it ends with it."""
        self._link: socket.socket | None = None
        self._root = ""
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        """Held while the process is started or ended."""
        self._starting = asyncio.Semaphore(NUM_STARTING)
        self._plays: dict[socket.socket, asyncio.Future[None]] = {}
        """Links of the plays that run, and futures of their ends."""
        self._closed = False

    async def start(self) -> None:
        """Start the process and import the function, unless it runs.

        Raises:
            RunError: the function cannot be loaded, or this object was closed.
            TimeoutError: the process was not ready within `import_timeout_s`.
        """
        async with self._changing:
            self._check_open()
            if self._link is not None and not _is_ended(self._link):
                return
            await self._end()
            try:
                await self._start()
            except BaseException:
                await self._end()
                raise

    async def play(self, spec: AgentSpec, *, end: asyncio.Event | None = None) -> AgentResult:
        """Return what became of an agent, once all that it has started is gone.

        Cancelling the call ends the agent.

        Args:
            end: event that ends the agent early, with the reason "ended"; `close` does the same.

        Raises:
            AgentProcessLostError: the process of all agents ended, or the guard of this one.
            RunError, TimeoutError: as `start`, which is called if the process does not run.
            ValueError: the argument does not pickle, or there is no function and no command.
        """
        request = self._make_request(spec)
        try:
            return await self._play_once(spec, request=request, end=end)
        except _NotBegunError:
            # Killed a moment ago, perhaps: nothing has been started, so that it can be repeated.
            return await self._play_once(spec, request=request, end=end)

    async def close(self) -> None:
        """End all agents, whose plays return the reason "ended", and the process. Idempotent."""
        self._closed = True
        plays = list(self._plays.values())
        for link in self._plays:
            _ask_for_end(link)
        if plays:
            await asyncio.wait(plays, timeout=END_S)
        # An import may take long: its end wakes the call that waits for it.
        if self.process is not None and self.process.pid is not None:
            self.process.terminate()
        async with self._changing:
            await self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the agent process was closed")

    def _make_request(self, spec: AgentSpec) -> bytes:
        self._check_open()
        if spec.command is None and self._function is None:
            raise ValueError("command=None needs an AgentProcess with a function")
        # Pickled twice, as the agent is to read it, not its guard.
        try:
            argument = None if spec.command is not None else pickle.dumps(spec.argument)
        except Exception as error:
            raise ValueError(
                f"argument={describe_value(spec.argument)} cannot be sent to the agent's process: "
                f"{error}"
            ) from error
        content = pickle.dumps(dataclasses.replace(spec, argument=argument))
        return LENGTH.pack(len(content)) + content

    async def _start(self) -> None:
        # Spawned, not forked: this process has threads and loaded runtimes.
        context = multiprocessing.get_context("spawn")
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        with theirs:
            self.process = context.Process(
                target=run_zygote,
                args=(theirs, self._function, self._keep_env),
                name="agents",
                daemon=True,
            )
            # Not left half started by a cancellation.
            starting = asyncio.ensure_future(asyncio.to_thread(_start_alone, self.process))
            try:
                await asyncio.shield(starting)
            finally:
                await asyncio.wait([starting])
        self._check_open()
        limit_s, content = self._import_timeout_s, b""
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):
                    loop = asyncio.get_running_loop()
                    content = await loop.sock_recv(self._link, MAX_REPORT_BYTES)
        except TimeoutError:
            raise TimeoutError(
                f"the agent process did not import {self._function!r} within "
                f"import_timeout_s={limit_s:g} s"
            ) from None
        if not content:
            await asyncio.to_thread(self.process.join, END_S)
            self._check_open()
            code = self.process.exitcode
            how = f"killed by {signal_name(-code)}" if code and code < 0 else f"exit code {code}"
            raise RunError(
                f"the agent process ended while importing {self._function!r} ({how}): see stderr"
            )
        report: ZygoteReport = pickle.loads(content)
        if report.problem is not None:
            raise RunError(f"the agent function cannot be loaded: {report.problem}")
        self._root = report.root
        if report.threads:
            logger.warning(
                "importing %s started threads, which agents do not have: %s",
                self._function,
                ", ".join(report.threads),
            )

    async def _play_once(
        self, spec: AgentSpec, *, request: bytes, end: asyncio.Event | None
    ) -> AgentResult:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with ours, theirs:
            ours.setblocking(False)
            try:
                async with self._starting:
                    await self.start()
                    self._plays[ours] = done
                    await self._begin(number, ours, theirs, request=request)
                return await self._await_result(number, ours, limit_s=spec.time_limit_s, end=end)
            except asyncio.CancelledError:
                # Otherwise the end of the others' copies would not be noticed.
                theirs.close()
                await _end_play(ours)
                raise
            except AgentProcessLostError:
                self._check_open()
                raise
            finally:
                self._plays.pop(ours, None)
                done.set_result(None)

    async def _begin(
        self, number: int, ours: socket.socket, theirs: socket.socket, *, request: bytes
    ) -> None:
        """Hand the link of a play to the zygote, and the request to the guard that it forks."""
        loop, begun = asyncio.get_running_loop(), b""
        # Another play may replace it while this one waits.
        link = self._link
        assert link is not None
        try:
            socket.send_fds(link, [PLAY + b" %d" % number], [theirs.fileno()])
        except OSError as error:
            link.close()
            raise _NotBegunError(f"the agent process ended ({error.strerror})") from error
        theirs.close()
        try:
            async with asyncio.timeout(BEGIN_S):
                # A guard that has ended tells why, or the zygote does.
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(ours, request)
                with contextlib.suppress(ConnectionError):
                    begun = await loop.sock_recv(ours, len(BEGUN))
                if begun == BEGUN:
                    return
                content = begun + await _read_to_end(ours)
        except TimeoutError:
            # The next play starts another process.
            link.close()
            raise AgentProcessLostError(
                f"the agent process did not start an agent within {BEGIN_S:g} s"
            ) from None
        if not content:
            link.close()
            raise _NotBegunError("the agent process ended before it started the agent")
        raise AgentProcessLostError(_read_reason(content))

    async def _await_result(
        self, number: int, ours: socket.socket, *, limit_s: float, end: asyncio.Event | None
    ) -> AgentResult:
        waiting = None
        if end is not None:
            waiting = asyncio.ensure_future(_end_at(end, ours))
        try:
            async with asyncio.timeout(limit_s + ANSWER_S):
                content = await _read_to_end(ours)
        except TimeoutError:
            self._kill(number)
            raise AgentProcessLostError(
                f"the guard of an agent did not answer within {ANSWER_S:g} s beyond "
                f"time_limit_s={limit_s:g}"
            ) from None
        finally:
            if waiting is not None:
                waiting.cancel()
        kind, head = content[:1], 1 + LENGTH.size
        if kind == RESULT and len(content) == head + LENGTH.unpack(content[1:head])[0]:
            result: AgentResult = pickle.loads(content[head:])
            return result
        raise AgentProcessLostError(_read_reason(content))

    def _kill(self, number: int) -> None:
        """Have the zygote kill a guard that does not answer."""
        with contextlib.suppress(OSError):
            if self._link is not None:
                self._link.send(KILL + b" %d" % number)

    async def _end(self) -> None:
        """End the process and all agents, if there is one, and wait for the end."""
        process, self.process = self.process, None
        if self._link is not None:
            self._link.close()
            self._link = None
        if process is not None:
            await asyncio.to_thread(_end_process, process, root=self._root)
        self._root = ""


def _start_alone(process: SpawnProcess) -> None:
    """Start a process that does not import the program's main module.

    A script would have to be written for that, and every agent would have its modules in memory.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main


def _end_process(process: SpawnProcess, *, root: str) -> None:
    if process.pid is not None:  # it has been started
        process.terminate()
        process.join(END_S)
        process.kill()  # a guard that another process has stopped
        process.join(END_S)
    if root:
        # The guard does it, unless it was killed.
        shutil.rmtree(root, ignore_errors=True)


def _is_ended(link: socket.socket) -> bool:
    """Return whether the other side has gone; it never sends anything."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ask_for_end(link: socket.socket) -> None:
    """Ask the guard of a play to end it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)


async def _end_at(event: asyncio.Event, link: socket.socket) -> None:
    await event.wait()
    _ask_for_end(link)


async def _end_play(link: socket.socket) -> None:
    """Ask for the end of a play, and wait for it."""
    _ask_for_end(link)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(END_S):
            await _read_to_end(link)


async def _read_to_end(link: socket.socket) -> bytes:
    """Return all that is still sent; nothing of a connection that was reset."""
    loop, data = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await loop.sock_recv(link, CHUNK_BYTES):
            data += chunk
    return bytes(data)


def _read_reason(content: bytes) -> str:
    """Return why a play has no result, from what was sent instead."""
    if content[:1] == LOST:
        return content[1 + LENGTH.size :].decode(errors="replace")
    # The zygote holds the links of all plays until it has told their ends.
    return "the guard of the agent ended" if content else "the agent process ended"
