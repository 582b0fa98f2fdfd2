"""Process that ends a run's hosts if the controller was killed: `python -m actors.guard RUN`.

Workers of ProcessJob and jobs of a scheduler outlive the process that asked for them. The controller writes
its job to the guard's stdin, and kills the guard once it has ended the job itself. If stdin closes before that,
the controller is gone and the guard ends the job. Monarch is imported only then.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

from actors.processes import RUN, RUN_VARIABLE, carrying_environment, import_path
from rl.utils.processes import kill

END_LIMIT_S = 120


class Guard:
    """The controller's handle of its guard process."""

    def __init__(self, job: Any) -> None:
        """Start the process for a job that has been applied."""
        env = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.guard", RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=env | {"PYTHONPATH": import_path()},
            start_new_session=True,  # Ctrl-C is for the controller
        )
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard: the job has ended, or the controller takes care of it."""
        self._process.kill()
        self._process.communicate()


def main(run: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = sys.stdin.buffer.readline()
    sys.stdin.buffer.read()  # ends when the controller does
    if not job:
        return
    for process in carrying_environment(RUN_VARIABLE, run):
        kill(process)
    signal.alarm(END_LIMIT_S)  # ends this process if a scheduler does not answer
    pickle.loads(base64.b64decode(job)).kill()


if __name__ == "__main__":
    main(sys.argv[1])
