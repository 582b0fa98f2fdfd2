"""Run any task: `python -m rl.train --module sum_digits --config tiny --trainer.optimizer.lr
3e-4`.
"""

from __future__ import annotations

from importlib import import_module

from rl.config.cli import main
from rl.utils.compat import exit_process

if __name__ == "__main__":
    exit_process(
        main(
            default_module="sum_digits",
            default_config="tiny",
            prog="python -m rl.train",
            early=import_module("actors.launch.early").start_early,
        )
    )
