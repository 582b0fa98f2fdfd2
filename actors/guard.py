"""Process that cleans up once the controller has ended, however it ended: `python -m actors.guard NAME RUN`.

Temporary files, workers of ProcessJob and jobs of a scheduler outlive a controller that is killed. The controller
writes to the guard's stdin what has to be called then. When the controller ends, stdin closes, and the guard
kills what is left of the run on this machine and makes that call. Monarch is imported only then.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from actors import processes
from actors.processes import RUN_VARIABLE, carrying_environment, import_path
from rl.utils.processes import is_alive, kill

END_LIMIT_S = 120


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


def main(run: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    clean_up = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()  # ends when the controller does
    if not clean_up:
        return
    signal.alarm(END_LIMIT_S)  # ends this process if a scheduler does not answer
    while left := carrying_environment(RUN_VARIABLE, run):  # again, as one of them may have started another
        for process in left:
            kill(process)
        while any(map(is_alive, left)):  # they may still write files
            time.sleep(0.01)
    pickle.loads(base64.b64decode(clean_up))()


if __name__ == "__main__":
    main(sys.argv[2])
