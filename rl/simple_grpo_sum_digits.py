"""GRPO on sum-digits; the tiny default runs on a laptop's CPU: `python -m rl.simple_grpo_sum_digits`."""

from __future__ import annotations

from rl.config.entry import main
from rl.interpreter import leave

if __name__ == "__main__":
    leave(
        main(default_module="sum_digits", default_config="tiny", prog="python -m rl.simple_grpo_sum_digits")
    )
