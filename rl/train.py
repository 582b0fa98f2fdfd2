"""Run any task: `python -m rl.train --module sum_digits --config tiny --trainer.optimizer.lr 3e-4`."""

from __future__ import annotations

from rl.config.entry import main
from rl.interpreter import leave

if __name__ == "__main__":
    leave(main(default_module="sum_digits", default_config="tiny", prog="python -m rl.train"))
