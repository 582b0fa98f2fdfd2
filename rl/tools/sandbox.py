"""A sandbox for Python code that a model wrote.

Each call starts a fresh interpreter (`python -I -S`, so only the standard library) in an empty
folder, without environment variables or standard input. The process confines itself before it reads
the code (`rl/tools/sandbox_child.py`). This side enforces wall-clock time, output, the number of
files in the folder and, where the kernel does not, of threads. docs/rewards.md lists what the
sandbox prevents and what it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.tools.sandbox_child import LAUNCH, NAME, OUT_OF_MEMORY
from rl.tools.tool import ToolError, ToolTimeoutError
from rl.utils.errors import RunError
from rl.utils.processes import signal_name
from rl.utils.threads import run_now

logger = logging.getLogger(__name__)

Reason = Literal[
    "ok", "error", "time limit", "memory limit", "output limit", "file limit", "thread limit"
]

ROOT = str(Path(__file__).parents[2])
CHECK_S = 60.0
"""Time limit of the trial run at the start."""
TRIAL = """
import os
fork = lambda: os._exit(0) if os.fork() == 0 else None
read = lambda: os.open("/proc/self/environ", 0)
for attempt in (fork, read):
    try:
        attempt()
    except PermissionError:
        continue
    raise SystemExit("the kernel does not enforce what it took")
"""
"""Code that tries what confined code must not be able to do."""
LOOK_S = 0.05
"""Interval at which files and threads are counted."""
GRACE_S = 5.0
"""Time that a killed process may take to disappear."""
MIB = 1 << 20
NUM_OPEN_FILES = 64
NUM_THREADS = 64
STACK_BYTES = 8 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """The outcome of one call."""

    reason: Reason
    output: str
    """Output and errors, with the traceback of an error."""
    status: int
    """Exit status as in `subprocess.Popen.returncode`: negative for a signal."""
    wall_s: float

    @property
    def text(self) -> str:
        """Text that the model is shown."""
        said = self.output.rstrip("\n")
        if self.reason not in ("ok", "error"):
            return f"{said}\nError: stopped at its {self.reason}".lstrip("\n")
        if self.status < 0:
            return f"{said}\nError: ended by {signal_name(-self.status)}".lstrip("\n")
        return said or (
            "(no output)" if self.reason == "ok" else f"Error: exit status {self.status}"
        )


class PythonSandbox(Configurable):
    """The tool `python`: runs code and returns its output and the value of its last expression.

    All episodes share one object; calls overlap up to `num_at_once`.

    Raises:
        ValueError: this machine is not Linux, or lacks seccomp or Landlock and `allow_unconfined`
            is off.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Limits of a call, the number of calls at the same time, and folders to import from."""

        time_limit_s: float = 5.0
        """Wall-clock time of one call, from the start of its process; waiting for a slot is not
        counted.
        """
        wait_limit_s: float = 30.0
        """Longest wait for a slot; then the model is told of a timeout. Together with
        `time_limit_s` less than `loop.episode.step_timeout_s`, or a full sandbox fails rollouts."""
        cpu_limit_s: int = 5
        """CPU time of all threads of one call, enforced by the kernel."""
        memory_limit_mib: int = 512
        """Address space of the process. Python itself takes about 20."""
        max_output_bytes: int = 64 * 1024
        """Bytes of stdout and stderr together."""
        max_file_mib: int = 4
        """Size of one file. Times `max_files`, it bounds the disk space of the call's folder (or
        the memory, if the temporary folder is a tmpfs)."""
        max_files: int = 64
        """Files that the call's folder may hold at a time, the file of the code itself included."""
        num_at_once: int = 0
        """Processes at the same time; other calls wait. 0: as many as this process may use CPU
        cores.
        """
        import_paths: tuple[str, ...] = ()
        """Folders that the code may read and import from, besides the standard library."""
        allow_unconfined: bool = False
        """Run code without seccomp or Landlock on a machine that lacks them, so that it can start
        processes, use the network, and read and write files."""

        def __post_init__(self) -> None:
            check_bounds(self, "time_limit_s", "wait_limit_s", at_least=0.1)
            check_bounds(self, "cpu_limit_s", "max_output_bytes", "max_files", at_least=1)
            check_bounds(self, "memory_limit_mib", at_least=64)
            check_bounds(self, "max_file_mib", "num_at_once", at_least=0)
            for path in self.import_paths:
                if not os.path.isdir(path):
                    raise ValueError(f"import_paths: {path!r} is not a folder")

    def __init__(self, *, config: Config) -> None:
        self.config = config
        self.name = "python"
        self.description = (
            "Run Python code and see what it prints, and the value of its last expression. Every "
            "call starts afresh: nothing is kept from earlier ones. The standard library is there, "
            f"the network is not. Limits: {config.time_limit_s:g} s, {config.memory_limit_mib} MiB."
        )
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
            "additionalProperties": False,
        }
        if sys.platform != "linux":
            raise ValueError(f"the Python sandbox runs on Linux only, not on {sys.platform}")
        self._num_slots = config.num_at_once or len(os.sched_getaffinity(0))
        # All environments of a run are called in one event loop.
        self._slots = asyncio.Semaphore(self._num_slots)
        if not config.allow_unconfined:
            self._check()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        result = await self.run(arguments["code"])
        if result.reason == "time limit":
            raise ToolTimeoutError(result.text)
        if result.reason != "ok":
            raise ToolError(result.text)
        return result.text

    async def run(self, code: str, *, time_limit_s: float | None = None) -> SandboxResult:
        """Run code within the config's time limit, or another one, and return its outcome.

        Raises:
            ToolTimeoutError: no slot was free for `wait_limit_s`.
            RunError: the process could not confine itself, so it did not read the code.
        """
        try:
            async with asyncio.timeout(self.config.wait_limit_s):
                await self._slots.acquire()
        except TimeoutError:
            raise ToolTimeoutError(
                f"Error: not run: all {self._num_slots} slots were taken for "
                f"{self.config.wait_limit_s:g} s"
            ) from None
        # The folder is the call's own, and is removed with all that the code wrote.
        started = time.monotonic()
        folder = tempfile.mkdtemp(prefix="relay-sandbox-")
        try:
            Path(folder, NAME).write_bytes(code.encode(errors="surrogatepass"))
            output, status, stopped = await self._run_child(folder, code, time_limit_s=time_limit_s)
        finally:
            self._slots.release()
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning("Python sandbox: %s could not be removed: %s", folder, error)
        wall_s = time.monotonic() - started
        reason = stopped or self._find_reason(status, wall_s)
        return SandboxResult(reason=reason, output=output, status=status, wall_s=wall_s)

    def _find_reason(self, status: int, wall_s: float) -> Reason:
        # The CPU limit sends SIGXCPU, and SIGKILL a second later if the code blocks the first.
        killed_late = status == -signal.SIGKILL and wall_s >= self.config.cpu_limit_s
        if status == -signal.SIGXCPU or killed_late:
            return "time limit"
        if status == OUT_OF_MEMORY:
            return "memory limit"
        return "ok" if status == 0 else "error"

    async def _run_child(
        self, folder: str, code: str, *, time_limit_s: float | None
    ) -> tuple[str, int, Reason | None]:
        """Run one child process; return its output, its exit status and the limit it exceeded.

        The process and its session are dead when this returns, raises or is cancelled.
        """
        config, output = self.config, bytearray()
        parent_end, child_end = os.pipe()
        os.set_blocking(parent_end, False)
        with open(parent_end, "rb") as refusal:
            try:
                process = await self._start(folder, code, refusal=child_end)
            finally:
                os.close(child_end)
            ended = asyncio.gather(
                _read(process.stdout, into=output, most=config.max_output_bytes), process.wait()
            )
            stopped: Reason | None = None
            try:
                async with asyncio.timeout(time_limit_s or config.time_limit_s):
                    while not (ended.done() or stopped) and len(output) <= config.max_output_bytes:
                        await asyncio.wait([ended], timeout=LOOK_S)
                        stopped = self._find_exceeded(folder, pid=process.pid)
            except TimeoutError:
                stopped = "time limit"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # A confined process cannot leave its group.
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait([ended], timeout=GRACE_S)
            if process.returncode is None:
                raise OSError(
                    f"child process {process.pid} still exists {GRACE_S:g} s after it was killed"
                )
            problem = refusal.read()
            if problem:
                raise RunError(f"the Python sandbox: {problem.decode()}")
        if len(output) > config.max_output_bytes:
            stopped = "output limit"
        return (
            output[: config.max_output_bytes].decode(errors="replace"),
            process.returncode,
            stopped,
        )

    async def _start(self, folder: str, code: str, *, refusal: int) -> asyncio.subprocess.Process:
        """Start the child; send it the code, and the pipe for the reason of a refusal."""
        pipe = asyncio.subprocess.PIPE
        # The real path: the code may not read the virtual environment's folder.
        python = os.path.realpath(sys.executable)
        process = await asyncio.create_subprocess_exec(
            *(python, "-I", "-S", "-X", "utf8", "-c", LAUNCH, ROOT),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
            pass_fds=(refusal,),
        )
        assert process.stdin is not None
        process.stdin.write(self._request(code, refusal=refusal))
        process.stdin.close()
        return process

    def _find_exceeded(self, folder: str, *, pid: int) -> Reason | None:
        """Return the limit that a call has exceeded and that the kernel does not enforce."""
        # Confined code can make no folders, so one listing finds every file. A removed file that is
        # still open or mapped is not listed; RLIMIT_FSIZE and the time limits bound its size.
        # Code that is not confined may remove even the folder.
        with contextlib.suppress(FileNotFoundError):
            if len(os.listdir(folder)) > self.config.max_files:
                return "file limit"

        # The kernel enforces this one only where the child may have a user or a user namespace of
        # its own.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"/proc/{pid}/task").st_nlink - 2 > NUM_THREADS:
                return "thread limit"
        return None

    def _request(self, code: str, *, refusal: int) -> bytes:
        limits = {
            "RLIMIT_AS": self.config.memory_limit_mib * MIB,
            "RLIMIT_CPU": self.config.cpu_limit_s,
            "RLIMIT_FSIZE": self.config.max_file_mib * MIB,
            "RLIMIT_NOFILE": NUM_OPEN_FILES,
            "RLIMIT_NPROC": NUM_THREADS,
            "RLIMIT_STACK": STACK_BYTES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }
        request = {
            "code": code,
            "refusal": refusal,
            "import_paths": [os.path.realpath(path) for path in self.config.import_paths],
            "limits": limits,
            "parent": os.getpid(),
            "unconfined": self.config.allow_unconfined,
        }
        return marshal.dumps(request)

    def _check(self) -> None:
        """Start a child that confines itself and then tries to break out."""
        try:
            result = run_now(self.run(TRIAL, time_limit_s=CHECK_S))
            problem = "" if result.reason == "ok" else result.text
        except RunError as error:
            problem = str(error)
        if problem:
            raise ValueError(
                f"the Python sandbox cannot confine code on this machine: {problem}. Set "
                "allow_unconfined=True to run code anyway, only where it can do no harm"
            )


async def _read(stream: asyncio.StreamReader | None, *, into: bytearray, most: int) -> None:
    """Read to the end, and keep a little more than `most` bytes."""
    assert stream is not None
    while data := await stream.read(1 << 16):
        if len(into) <= most:
            into += data
