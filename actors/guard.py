"""Guards, and a folder for temporary files: nothing of a run outlives its controller, however it
ends.

Temporary files, workers of ProcessJob and jobs of a scheduler outlive a controller that is killed.
For each of them a guard process (`python -m actors.guard NAME RUN`) waits: the controller writes to
its stdin what has to be called then. When the controller ends, stdin closes, and the guard kills
what is left of the run on this machine and makes that call. Monarch is imported only then.
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actors import processes
from actors.processes import RUN_VARIABLE, carrying_environment, import_path
from rl.utils.errors import RunError
from rl.utils.processes import is_alive, kill

END_LIMIT_S = 120
PREFIX = "relay-tmp-"
MAX_PATH = 45
"""Characters of the temporary folder's path: the sockets in it are limited to 107 characters."""
GUARD_NAME = "temporary-files"


class Guard:
    """The controller's handle of a guard process."""

    def __init__(self, clean_up: Callable[[], object], *, name: str) -> None:
        """Start the process; `clean_up` must pickle, and `name` is for lists of processes."""
        env = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.guard", name, processes.RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=env | {"PYTHONPATH": import_path()},
            start_new_session=True,  # Ctrl-C is for the controller
        )
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(clean_up)) + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard: the controller has cleaned up itself."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def temporary_files() -> Iterator[None]:
    """Point TMPDIR at a guarded folder, for this process and the processes it starts.

    Monarch, vLLM and multiprocessing keep sockets there. The folder is made in the current TMPDIR,
    or in /tmp if that path is too long for sockets. Compiled code, which is for later runs too, is
    elsewhere (`rl.utils.caches`).
    """
    folder, _ = _guarded_folder()
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
def _guarded_folder() -> tuple[str, Guard]:
    """Make this process's folder: one for all its runs, as Monarch's client keeps its sockets from
    run to run.
    """
    # The cache also keeps the guard: its pipe must stay open until this process ends.
    try:
        parent = Path(tempfile.gettempdir())
    except OSError as error:  # none of the usual folders can be written
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
    return folder, Guard(
        functools.partial(shutil.rmtree, folder, ignore_errors=True), name=GUARD_NAME
    )


def main(run: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    clean_up = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()  # ends when the controller does
    if not clean_up:
        return
    signal.alarm(END_LIMIT_S)  # ends this process if a scheduler does not answer
    while left := carrying_environment(
        RUN_VARIABLE, run
    ):  # again, as one of them may have started another
        for process in left:
            kill(process)
        while any(map(is_alive, left)):  # they may still write files
            time.sleep(0.01)
    pickle.loads(base64.b64decode(clean_up))()


if __name__ == "__main__":
    main(sys.argv[2])
