"""Process of a run that `relay.process` starts: reads the request, runs it, writes how it ended.

Started by its path, so that `rl` and the other packages are relay's own whatever the current folder
holds:

    python -P relay/child.py REQUEST END PARENT [network]

REQUEST is a file with the pickled request, END the file for status and message. The process is
stopped when PARENT ends. With `network` the run's actors use the machine's network.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import relay  # noqa: F401  (imports relay's packages before those of the current folder)

del sys.path[0]


def main(request_file: Path, end_file: Path, *, parent: int, network: bool) -> int:
    """Run a pickled request, and return the exit status."""
    from rl.config.cli import prepare_process, run_request
    from rl.utils.processes import die_with_parent

    # Before anything of the user's is loaded: functions are pickled by the names of their modules.
    sys.path[:0] = json.loads(os.environ["RELAY_IMPORT_PATH"])
    prepare_process(network=network)
    die_with_parent(parent)  # a new user namespace would forget it
    early = importlib.import_module("actors.launch.early")
    try:
        with early.start_early(()):
            import cloudpickle

            importlib.import_module("actors.controller")  # the class that the config builds
            request = cloudpickle.loads(request_file.read_bytes())
            status, message = run_request(request)
        end_file.write_text(json.dumps({"status": status, "message": message}))
    finally:
        # A parent that has ended cannot remove the folder that the two share.
        if os.getppid() != parent:
            shutil.rmtree(end_file.parent, ignore_errors=True)
    return status


if __name__ == "__main__":
    from rl.utils.compat import exit_process

    _, request_name, end_name, parent_pid, *flags = sys.argv
    status = main(
        Path(request_name), Path(end_name), parent=int(parent_pid), network="network" in flags
    )
    exit_process(status)
