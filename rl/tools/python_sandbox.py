"""Python code of a model, run in a process that cannot harm the machine.

Each call starts a fresh interpreter (`python -I -S`, so the standard library alone) in an empty folder that
is removed afterwards, without environment variables or standard input. The process confines itself before it
sees the code (`rl/tools/confinement.py`), and is killed at its limits. docs/tools.md says what that holds and
what not.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.config.configurable import Configurable
from rl.errors import RunError
from rl.tools.sandbox_child import LAUNCH, NAME, NOT_CONFINED, OUT_OF_MEMORY
from rl.tools.sandbox_process import Ended, Stop, WatchLimits, run_child
from rl.tools.slots import Slots
from rl.tools.tool import ToolError, ToolTimeoutError

logger = logging.getLogger(__name__)

Reason = Stop | Literal["ok", "error", "memory limit"]

ROOT = str(Path(__file__).parents[2])
CHECK_S = 60.0
"""Within this the first child has said how it is held."""
MIB = 1 << 20
NUM_OPEN_FILES = 64
STACK_BYTES = 8 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """What code of a sandbox is held by on this machine."""

    seccomp: bool
    """System calls are filtered: it makes no process, signals nobody, reaches no network."""
    landlock_abi: int
    """Version of Landlock, which holds it to its folder and Python's own files. 0 without: then it writes no
    file at all, and reads what this user can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """How code ended and what it said."""

    reason: Reason
    stdout: str
    stderr: str
    """Its end; the traceback of an error."""
    status: int
    """As of `subprocess.Popen.returncode`: negative for a signal."""
    wall_s: float

    @property
    def text(self) -> str:
        """What a model is told."""
        said = "\n".join(part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip())
        if self.reason not in ("ok", "error"):
            return f"{said}\nError: stopped at its {self.reason}".lstrip("\n")
        if self.status < 0:
            number = -self.status
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"{said}\nError: ended by {name}".lstrip("\n")
        return said or ("(no output)" if self.reason == "ok" else f"Error: exit status {self.status}")


class PythonSandbox(Configurable):
    """The tool `python`: runs code, answers with what it printed and the value of its last expression.

    One object serves all episodes; calls overlap as far as there are places.

    Raises:
        ValueError: this machine has no seccomp, and `allow_unconfined` is off; or it is not Linux.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        time_limit_s: float = 5.0
        """Wall-clock time of one call, from the start of its process; waiting for a place is not counted."""
        wait_limit_s: float = 30.0
        """Longest wait for a place; then the model is told of a timeout. Together with `time_limit_s` less
        than `loop.episode.step_timeout_s`, or full places fail rollouts."""
        cpu_limit_s: int = 5
        """CPU time of all threads of one call, held by the kernel."""
        memory_limit_mib: int = 512
        """Address space of the process. Python itself takes about 20."""
        max_output_bytes: int = 64 * 1024
        """Of stdout and stderr together."""
        max_file_mib: int = 16
        """Size of one file."""
        max_files: int = 64
        """In its folder, the code's own file included."""
        max_threads: int = 32
        num_at_once: int = 0
        """Processes at the same time; other calls wait. 0: as many as this process may use CPU cores."""
        import_paths: tuple[str, ...] = ()
        """Folders to import from beside the standard library, which the code may read."""
        allow_unconfined: bool = False
        """Run where seccomp is not there, and code makes processes and reaches the network as it likes."""

        def __post_init__(self) -> None:
            for name, least in (("time_limit_s", 0.1), ("wait_limit_s", 0.1), ("cpu_limit_s", 1),
                                ("memory_limit_mib", 64), ("max_output_bytes", 1), ("max_file_mib", 0),
                                ("max_files", 1), ("max_threads", 1), ("num_at_once", 0)):  # fmt: skip
                value = getattr(self, name)
                if not value >= least:
                    raise ValueError(f"{name}={value} is below {least}")
            for path in self.import_paths:
                if not os.path.isdir(path):
                    raise ValueError(f"import_paths: {path!r} is not a folder")

    def __init__(self, *, config: Config) -> None:
        self.config = config
        self.name = "python"
        self.description = (
            "Run Python code and see what it prints, and the value of its last expression. Every call starts "
            "afresh: nothing is kept from earlier ones. The standard library is there, the network is not. "
            f"Limits: {config.time_limit_s:g} s, {config.memory_limit_mib} MiB."
        )
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
            "additionalProperties": False,
        }
        self.confinement = self._check()
        self._slots = Slots(config.num_at_once or len(os.sched_getaffinity(0)))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        result = await self.run(arguments["code"])
        if result.reason == "time limit":
            raise ToolTimeoutError(result.text)
        if result.reason != "ok":
            raise ToolError(result.text)
        return result.text

    async def run(self, code: str) -> SandboxResult:
        """
        Raises:
            ToolTimeoutError: there was no place for `wait_limit_s`.
            RunError: the process could not be confined, and so did not see the code.
        """
        places = self._slots.here()
        try:
            async with asyncio.timeout(self.config.wait_limit_s):
                await places.acquire()
        except TimeoutError:
            raise ToolTimeoutError(
                f"Error: not run: all {self._slots.num} places were taken for {self.config.wait_limit_s:g} s"
            ) from None
        try:
            folder = tempfile.mkdtemp(prefix="relay-sandbox-")
            token = secrets.token_hex()
            try:
                Path(folder, NAME).write_bytes(code.encode(errors="surrogatepass"))
                ended = await run_child(
                    self._command(),
                    stdin=self._request(code, token=token),
                    folder=folder,
                    limits=WatchLimits(
                        time_s=self.config.time_limit_s,
                        output_bytes=self.config.max_output_bytes,
                        num_files=self.config.max_files,
                        num_threads=self.config.max_threads,
                    ),
                )
            finally:
                _remove(folder)
        finally:
            places.release()
        if ended.status == NOT_CONFINED and ended.stderr.startswith(token.encode()):
            raise RunError(f"the Python sandbox: {ended.stderr.decode().removeprefix(token).strip()}")
        return SandboxResult(
            reason=self._reason(ended),
            stdout=ended.stdout.decode(errors="replace"),
            stderr=ended.stderr.decode(errors="replace"),
            status=ended.status,
            wall_s=ended.wall_s,
        )

    def _reason(self, ended: Ended) -> Reason:
        if ended.stopped is not None:
            return ended.stopped
        # At the limit of CPU time comes SIGXCPU, and a second later, if that is blocked, SIGKILL.
        late = ended.status == -signal.SIGKILL and ended.wall_s >= self.config.cpu_limit_s
        if ended.status == -signal.SIGXCPU or late:
            return "time limit"
        if ended.status == OUT_OF_MEMORY:
            return "memory limit"
        return "ok" if ended.status == 0 else "error"

    def _command(self) -> list[str]:
        # Not the virtual environment's link: its folder is not for the code to read.
        python = os.path.realpath(sys.executable)
        return [python, "-I", "-S", "-X", "utf8", "-c", LAUNCH, ROOT]

    def _request(self, code: str | None, *, token: str) -> bytes:
        limits = {
            "RLIMIT_AS": self.config.memory_limit_mib * MIB,
            "RLIMIT_CPU": self.config.cpu_limit_s,
            "RLIMIT_FSIZE": self.config.max_file_mib * MIB,
            "RLIMIT_NOFILE": NUM_OPEN_FILES,
            "RLIMIT_STACK": STACK_BYTES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }
        request = {
            "code": code,
            "token": token,
            "import_paths": [os.path.realpath(path) for path in self.config.import_paths],
            "limits": limits,
            "parent": os.getpid(),
            "unfiltered": self.config.allow_unconfined,
        }
        return marshal.dumps(request)

    def _check(self) -> Confinement:
        """Start a child that confines itself and tries to break out."""
        if sys.platform != "linux":
            raise ValueError(f"the Python sandbox runs on Linux only, not on {sys.platform}")
        with tempfile.TemporaryDirectory(prefix="relay-sandbox-") as folder:
            done = subprocess.run(
                self._command(),
                input=self._request(None, token=""),
                cwd=folder,
                env={},
                capture_output=True,
                timeout=CHECK_S,
                start_new_session=True,
                check=False,
            )
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode == NOT_CONFINED:
            raise ValueError(
                f"the Python sandbox cannot hold code on this machine: {said}. "
                "allow_unconfined=True runs it all the same, where nothing can come to harm"
            )
        if done.returncode != 0:
            raise ValueError(f"the Python sandbox does not start (exit status {done.returncode}): {said}")
        landlock, _, missing = done.stdout.decode().strip().partition(" ")
        if missing:
            logger.warning("Python sandbox: code can make processes and reach the network (%s)", missing)
        if landlock == "0":
            logger.warning("Python sandbox: no Landlock; code can read every file that this user can read")
        return Confinement(seccomp=not missing, landlock_abi=int(landlock))


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("Python sandbox: %s could not be removed: %s", folder, error)
