"""GRPO on sum-digits, on a laptop's CPU: `python -m rl.simple_grpo_sum_digits`.

The program is that of `python -m rl.train --module sum_digits --config tiny`; both have all
options, and start in `rl.config.cli.main`.
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
            prog="python -m rl.simple_grpo_sum_digits",
            early=import_module("actors.launch.early").start_early,
        )
    )
