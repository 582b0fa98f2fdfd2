"""Serve the Tinker API: `python -m rl.tinker.server --config tiny --port 8000`."""

from __future__ import annotations

from rl.config.entry import main
from rl.interpreter import leave

if __name__ == "__main__":
    leave(main(default_module="tinker", default_config="tiny", prog="python -m rl.tinker.server"))
