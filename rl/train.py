"""Run any task: `python -m rl.train --module sum_digits --config tiny --trainer.optimizer.lr 3e-4`."""

from __future__ import annotations

import sys

from rl.config.entry import main

if __name__ == "__main__":
    sys.exit(main(default_module="sum_digits", default_config="tiny", prog="python -m rl.train"))
