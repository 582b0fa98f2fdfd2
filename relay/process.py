"""A run in a process of its own, for scripts and notebooks.

The caller waits, shows what the run prints, and passes an interrupt on: the run then finishes its
step and saves. However the caller ends, the run ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relay.progress import View, make_view
from rl.config.registry import RunRequest
from rl.utils.errors import RunError
from rl.utils.own_packages import describe_hidden_folders, refuse_own_names
from rl.utils.user_code import list_import_path

CHILD = Path(__file__).with_name("child.py")
REQUEST, END = "request.pickle", "end.json"
POLL_S = 0.5
"""Time between two looks at the run."""
STOP_S = 120.0
"""Longest time in which an interrupted run may finish its step and save."""
KILL_S = 30.0
"""Time after a second interrupt before the run is killed."""


def run_in_process(request: RunRequest, *, folder: Path, quiet: bool) -> None:
    """Run a request to its end.

    Args:
        folder: folder that the run will have.
        quiet: show nothing.

    Raises:
        ValueError: the run could not start; says why.
        RunError: the run stopped.
        KeyboardInterrupt: it was interrupted, and has ended.
    """
    import cloudpickle

    refuse_own_names(map(Path, list_import_path()))
    view = make_view(folder=folder, num_steps=request.config.loop.num_steps, quiet=quiet)
    note = describe_hidden_folders(Path.cwd())
    if note is not None:
        view.add(note)
    with tempfile.TemporaryDirectory(prefix="relay-") as name:
        shared = Path(name)
        # A file, not a pipe: the program may start itself anew for another network.
        (shared / REQUEST).write_bytes(cloudpickle.dumps(request))
        launch = request.config.launch
        network = launch.on_cluster or launch.isolate_network is False
        with _start(shared, view=view, network=network) as process:
            _wait(process, view=view)
        _raise_end(shared / END, status=process.returncode)


@contextlib.contextmanager
def _start(shared: Path, *, view: View, network: bool) -> Iterator[subprocess.Popen[str]]:
    """Start the process; it has ended after the block, and its output has been shown."""
    # `-P`: the folder of the file, which is relay's own, is no place to import from.
    files = [str(shared / REQUEST), str(shared / END)]
    command = [sys.executable, "-P", str(CHILD), *files, str(os.getpid())]
    process = subprocess.Popen(
        [*command, "network"] if network else command,
        stdin=subprocess.DEVNULL,
        stdout=None if view.is_terminal else subprocess.PIPE,
        stderr=None if view.is_terminal else subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"RELAY_IMPORT_PATH": json.dumps(list_import_path())},
        # Ctrl-C of a terminal goes to all processes of a session: here it is passed on.
        start_new_session=True,
    )
    reader = threading.Thread(target=_read, args=(process, view), daemon=True)
    reader.start()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its guard ends the actors
        process.wait(timeout=KILL_S)
        reader.join(timeout=KILL_S)


def _read(process: subprocess.Popen[str], view: View) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        view.add(line.rstrip("\n"))


def _wait(process: subprocess.Popen[str], *, view: View) -> None:
    """Wait for the end of the run; an interrupt asks it to stop, a second one at once."""
    interrupted = False
    deadline_s = float("inf")
    while True:
        try:
            while process.poll() is None:
                view.refresh()
                time.sleep(POLL_S)
                if time.monotonic() > deadline_s:
                    process.kill()
            break
        except KeyboardInterrupt:
            limit_s = KILL_S if interrupted else STOP_S
            deadline_s = time.monotonic() + limit_s
            interrupted = True
            view.add("interrupted: the run finishes its step and saves; once more ends it at once")
            process.send_signal(signal.SIGINT)
    view.close()
    if interrupted:
        raise KeyboardInterrupt


def _raise_end(file: Path, *, status: int) -> None:
    """Raise the error of a run that did not end well."""
    end: dict[str, Any] = {"status": status, "message": ""}
    with contextlib.suppress(OSError, ValueError):
        end = json.loads(file.read_text())
    message = end["message"].removeprefix("error: ")
    if end["status"] == 2:
        raise ValueError(message or "the run could not start, see above")
    if end["status"] != 0:
        raise RunError(message.removeprefix("the run stopped: ") or f"ended with status {status}")
