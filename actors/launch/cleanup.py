"""Processes of a run on this machine: nothing of a run outlives its controller, however it ends.

Temporary files, workers of ProcessJob and jobs of a scheduler outlive a controller that is killed.
For each of them a guard process (`python -m actors.launch.cleanup NAME RUN`) waits: the controller
writes to its stdin what has to be called then. When the controller ends, stdin closes, and the
guard kills what remains of the run on this machine and makes that call. Monarch is imported only
then.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from rl.utils.errors import RunError
from rl.utils.processes import ROLE_VARIABLE, ProcessId, identify, is_alive, kill
from rl.utils.user_code import is_of_python, list_import_path

SHARED_MEMORY = Path("/dev/shm")
RUN = uuid.uuid4().hex[:8]
"""Id that every process started by this controller carries in its environment."""
RUN_VARIABLE = "RELAY_RUN"
END_LIMIT_S = 120
PREFIX = "relay-tmp-"
MAX_PATH = 45
"""Characters of the temporary folder's path: the sockets in it are limited to 107 characters."""
GUARD_NAME = "temporary-files"


async def wait_until_gone(processes: Sequence[ProcessId], *, role: str, grace_s: float) -> None:
    """Wait for processes that were killed.

    Raises:
        RunError: a process is stuck in the kernel; names the role and the pids.
    """
    deadline = time.monotonic() + grace_s
    while living := list(filter(is_alive, processes)):
        if time.monotonic() > deadline:
            pids = [process.pid for process in living]
            raise RunError(f"{role}: processes {pids} outlived SIGKILL for {grace_s:g} s")
        await asyncio.sleep(0.02)


def list_with_descendants(roots: Iterable[ProcessId]) -> list[ProcessId]:
    """Return the processes and all that they have started, parents first."""
    # In a dict, which keeps the order: two roots may have descendants in common.
    tree: dict[ProcessId, None] = {}
    for root in roots:
        tree[root] = None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(root.pid).children(recursive=True):
                process = identify(child.pid)
                if process is not None:
                    tree[process] = None
    return list(tree)


def find_processes_of_role(role: str, *, parents: Iterable[int]) -> list[ProcessId]:
    """Return the processes of a role that these processes have started, without their children."""
    processes: list[ProcessId] = []
    for parent in parents:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(parent).children():
                with contextlib.suppress(psutil.Error):
                    if child.environ().get(ROLE_VARIABLE) == role:
                        process = identify(child.pid)
                        if process is not None:
                            processes.append(process)
    return processes


def find_by_environment(name: str, value: str) -> list[ProcessId]:
    """Return all processes of this machine with this variable in their environment."""
    processes: list[ProcessId] = []
    for candidate in psutil.process_iter():
        # An error means that the process has ended or is another user's.
        with contextlib.suppress(psutil.Error):
            if candidate.environ().get(name) == value:
                process = identify(candidate.pid)
                if process is not None:
                    processes.append(process)
    return processes


def find_shared_memory(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that any of the processes has mapped, also deleted files."""
    # From maps, which is instant. psutil's `memory_maps` reads smaps, which takes the kernel
    # seconds for a large process.
    files: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, separator, name = line.partition(f"{SHARED_MEMORY}/")
                if separator:
                    files.add(SHARED_MEMORY / name.removesuffix(" (deleted)"))
    return files


def remove_unmapped(files: Iterable[Path]) -> list[Path]:
    """Delete and return the shared-memory files that no living process has mapped."""
    candidates = {file for file in files if file.exists()}
    if not candidates:
        return []
    orphans = sorted(candidates - find_shared_memory(psutil.pids()))
    for file in orphans:
        file.unlink(missing_ok=True)
    return orphans


def find_own_address() -> str:
    """Return this host's address for other hosts."""
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address

    # Debian's /etc/hosts gives the host's own name a loopback address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # The address that a packet to another network would leave from. Nothing is sent;
        # 192.0.2.0/24 is reserved.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return address


def free_port() -> int:
    """Return an unused port of this host, below the range that the system assigns."""
    # An outgoing connection could take a port of that range between this call and the use.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.bind(("", port))
            return port


TREE = Path(__file__).resolve().parents[2]
"""Folder of the packages `actors` and `rl`."""


def import_path() -> str:
    """Return a PYTHONPATH with which actors can import what the controller can."""
    # Last, where it is none of them: relay's own packages. An actor's interpreter, maybe of another
    # installation, has the installed packages.
    paths = dict.fromkeys(list_import_path())
    if not is_of_python(str(TREE)):
        paths[str(TREE)] = None
    return os.pathsep.join(paths)


class Guard:
    """The controller's handle of a guard process."""

    def __init__(self, clean_up: Callable[[], object], *, name: str) -> None:
        """Start the process; `clean_up` must pickle, and `name` is for lists of processes."""
        # The guard ends all processes that carry the run's variable, so it must not carry it.
        env = dict(os.environ)
        env.pop(RUN_VARIABLE, None)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.launch.cleanup", name, RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Relay's packages first: the current folder may have some of these names.
            env=env | {"PYTHONPATH": f"{TREE}{os.pathsep}{import_path()}"},
            start_new_session=True,  # Ctrl-C is for the controller.
        )
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(clean_up)) + b"\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the guard: the controller has cleaned up itself."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def guard_temporary_files() -> Iterator[None]:
    """Point TMPDIR at a guarded folder, for this process and the processes it starts.

    Monarch, vLLM and multiprocessing keep sockets there. The folder is made in the current TMPDIR,
    or in /tmp if that path is too long for sockets. Compiled code, which is for later runs too, is
    elsewhere (`rl.utils.caches`).
    """
    folder, _ = _make_folder()
    before, python_before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = python_before
        if before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before


@functools.cache
def _make_folder() -> tuple[str, Guard]:
    """Make this process's folder, the same for all its runs, and start its guard."""
    # Once, as Monarch's client keeps its sockets from run to run. The cache also keeps the guard:
    # its pipe must stay open until this process ends.
    try:
        parent = Path(tempfile.gettempdir())
    except OSError as error:  # None of the usual folders can be written.
        raise RunError(
            f"no folder for temporary files: {error.strerror or error}; set TMPDIR"
        ) from error
    if len(str(parent / f"{PREFIX}12345678")) > MAX_PATH:
        parent = Path("/tmp")
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise RunError(
            f"no folder for temporary files in {parent}: {error.strerror or error}"
        ) from error
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    return folder, Guard(remove, name=GUARD_NAME)


def main(run: str) -> None:
    """Wait for the end of the controller, then end what remains of its run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    clean_up = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()  # Ends when the controller does.
    if not clean_up:
        return

    signal.alarm(END_LIMIT_S)  # Ends this process if a scheduler does not answer.
    # Again and again, as a process may have started another meanwhile.
    while strays := find_by_environment(RUN_VARIABLE, run):
        for process in strays:
            kill(process)
        while any(map(is_alive, strays)):  # They may still write files.
            time.sleep(0.01)
    pickle.loads(base64.b64decode(clean_up))()


if __name__ == "__main__":
    main(sys.argv[2])
