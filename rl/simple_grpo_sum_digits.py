"""GRPO on sum-digits; the tiny default runs on a laptop's CPU: `python -m
rl.simple_grpo_sum_digits`.
"""

from __future__ import annotations

from rl.config.cli import main
from rl.utils.compat import exit_process

if __name__ == "__main__":
    exit_process(
        main(
            default_module="sum_digits",
            default_config="tiny",
            prog="python -m rl.simple_grpo_sum_digits",
        )
    )
