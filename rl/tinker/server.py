"""Serve the Tinker API: `python -m rl.tinker.server --config tiny --port 8000`."""

from __future__ import annotations

from rl.config.cli import main
from rl.utils.compat import exit_process

if __name__ == "__main__":
    exit_process(
        main(default_module="tinker", default_config="tiny", prog="python -m rl.tinker.server")
    )
