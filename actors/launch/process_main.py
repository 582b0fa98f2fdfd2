"""Entry of an actor process: set-up that must precede Monarch's threads.

Started as `python -m actors.launch.process_main` (`member.spawn_processes`).
"""

from __future__ import annotations

import logging

from rl.observability.stacks import catch_signal
from rl.utils.compat import exit_process
from rl.utils.processes import leave_signals_to_controller
from rl.utils.proxies import allow_loopback


def main() -> None:
    # All this before the import of Monarch, which starts threads.
    leave_signals_to_controller()
    catch_signal()
    # Importing torchao, as vllm does, warns twice that PyTorch has changed.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

    from actors.launch.compat import run_actor_process
    from actors.launch.isolation import check_network, forget_empty_secrets

    check_network()
    forget_empty_secrets()
    allow_loopback()  # The host's environment may be another than the controller's.

    try:
        run_actor_process()
    except SystemExit as end:
        # Its actors have ended. With vllm loaded the interpreter's own end would take 2 s.
        exit_process(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    main()
