"""What an actor process runs: the few things to settle before Monarch starts its threads.

Started by `actors.launch` as `python -m actors.process_main`.
"""

from __future__ import annotations

import signal

from rl.interpreter import leave
from rl.observability.stacks import catch_signal


def main() -> None:
    # A terminal sends Ctrl-C to the whole process group, and job schedulers do so with SIGTERM. Only
    # the controller acts on them: it stops its meshes in order, which could not be done for actors
    # that died first. SIGTERM gets a handler, as children would inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    catch_signal()

    from monarch._src.actor import config
    from monarch._src.actor.bootstrap_main import invoke_main

    config.prefix_python_logs_with_actor = False  # our lines name role and rank
    try:
        invoke_main()
    except SystemExit as end:
        # Its actors have ended. With vllm loaded the interpreter's own end would take 2 s.
        leave(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    main()
