"""Registry module with short batch-invariant runs."""

from __future__ import annotations

from actors.controller import Controller
from rl.tasks.sum_digits import SumDigits
from tests.support.faulty_configs import short


def short_noise() -> Controller.Config:
    """Train on random rewards, from which a random model learns at once."""
    config = short()
    config.batch_invariant = True
    config.task = SumDigits.Config(num_integers=2, num_eval=8, reward="noise")
    config.trainer.optimizer.lr = 1e-3
    config.trainer.lr_scheduler.warmup_steps = 0
    config.loop.max_logprob_diff = 0.0
    return config
