"""Process of a run that `relay.process` starts: reads the request, runs it, writes how it ended.

Started by its path, so that `rl` and the other packages are relay's own whatever the current folder
holds:

    python -P relay/child.py FOLDER PARENT [network]

FOLDER has `request.pickle` and gets `end.json`. The process is stopped when PARENT ends. With
`network` the run's actors use the machine's network.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import relay  # noqa: E402, F401  (imports relay's packages before those of the current folder)

del sys.path[0]

REQUEST, END = "request.pickle", "end.json"


def main(folder: Path, *, parent: int, network: bool) -> int:
    """Run the request of a folder, and return the exit status."""
    from rl.config.cli import prepare_process, run_request
    from rl.utils.processes import die_with_parent

    sys.path[:0] = json.loads(os.environ["RELAY_IMPORT_PATH"])
    prepare_process(network=network)
    die_with_parent(parent)  # a new user namespace would forget it
    early = importlib.import_module("actors.launch.early")
    with early.start_early(()):
        import cloudpickle

        request = cloudpickle.loads((folder / REQUEST).read_bytes())
        status, message = run_request(request)
    with contextlib.suppress(OSError):  # the parent has ended
        (folder / END).write_text(json.dumps({"status": status, "message": message}))
    return status


if __name__ == "__main__":
    from rl.utils.compat import exit_process

    exit_process(
        main(Path(sys.argv[1]), parent=int(sys.argv[2]), network="network" in sys.argv[3:])
    )
