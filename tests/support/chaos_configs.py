"""Short batch-invariant runs, whose numbers are the same each time."""

from __future__ import annotations

from actors.controller import Controller
from configs.sum_digits import tiny
from rl.tasks.sum_digits import SumDigits


def chaos() -> Controller.Config:
    """Train a random model for four steps on random rewards, which give a gradient from the start, with a
    checkpoint after each step."""
    config = tiny()
    config.description = "short run for the chaos test"
    config.warmup = None
    config.task = SumDigits.Config(num_integers=2, num_eval=8, reward="noise")
    config.loop.num_steps = 4
    config.loop.groups_per_batch, config.loop.group_size = 8, 4
    config.loop.eval_every = 2
    config.loop.max_logprob_diff = 0.0
    config.trainer.num_threads = config.generator.num_threads = 1
    config.trainer.optimizer.lr = 1e-3
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.checkpoint.interval = 1
    config.recorder.num_groups = config.loop.groups_per_batch
    config.recorder.tokens = False
    config.timeouts.close_s = 10.0
    return config


def chaos_async() -> Controller.Config:
    """Return `chaos` with generation one step ahead."""
    config = chaos()
    config.loop.max_off_policy_steps = 1
    config.generator.on_update = "keep"
    return config
