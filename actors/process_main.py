"""What an actor process runs: the few things to settle before Monarch starts its threads.

Started by `actors.launch` as `python -m actors.process_main`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def main() -> None:
    # A terminal sends Ctrl-C to the whole process group, and job schedulers do so with SIGTERM. Only
    # the controller acts on them: it stops its meshes in order, which could not be done for actors
    # that died first. SIGTERM gets a handler, as children would inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    output_file = os.environ.pop("RELAY_OUTPUT_FILE", None)
    if output_file is not None:
        _redirect_output(Path(output_file))

    from monarch._src.actor import config
    from monarch._src.actor.bootstrap_main import invoke_main

    config.prefix_python_logs_with_actor = False  # our lines name role and rank
    invoke_main()


def _redirect_output(path: Path) -> None:
    """Send file descriptors 1 and 2 to the file, so that what C++ prints goes there too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    main()
