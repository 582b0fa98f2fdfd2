"""Ends a run's hosts if its controller was killed and cannot: `python -m actors.guard RUN`.

Workers of ProcessJob, and jobs of a scheduler, do not end with the process that asked for them.
The controller hands a job over on stdin, and "done" when it has ended the job itself; if stdin
closes before that, it is gone. Monarch is imported only then.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

from actors.processes import carrying_environment, kill

DONE = b"done\n"
GRACE_S = 10.0
END_LIMIT_S = 120


class Guard:
    """The controller's end of it."""

    def __init__(self, *, job: Any, run: str, run_variable: str, import_path: str) -> None:
        """`job` is one that has been applied."""
        env = {key: value for key, value in os.environ.items() if key != run_variable}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.guard", run_variable, run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=env | {"PYTHONPATH": import_path},
            start_new_session=True,  # Ctrl-C is for the controller
        )
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """The job is ended, or the controller takes care of it."""
        assert self._process.stdin is not None
        try:
            self._process.communicate(DONE, timeout=GRACE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()


def main(run_variable: str, run: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = sys.stdin.buffer.readline()
    if not job or sys.stdin.buffer.readline() == DONE:
        return
    # First what is on this machine: the kernel needs nobody else for that.
    for process in carrying_environment(run_variable, run):
        kill(process)
    signal.alarm(END_LIMIT_S)  # ends this process: a scheduler that does not answer is not waited for
    pickle.loads(base64.b64decode(job)).kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
