"""Serve the Tinker API: `python -m rl.tinker.server --config tiny --port 8000`."""

from __future__ import annotations

from rl.config.cli import main
from rl.utils.compat import exit_process
from rl.utils.processes import share_freed_memory

if __name__ == "__main__":
    # Before the imports of the config's module, which start threads.
    share_freed_memory()
    exit_process(
        main(default_module="tinker", default_config="tiny", prog="python -m rl.tinker.server")
    )
