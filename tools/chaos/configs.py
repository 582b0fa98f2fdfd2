"""Short runs in the batch-invariant mode, whose numbers are the same each time, whatever happens to them."""

from __future__ import annotations

from actors.controller import Controller
from configs.sum_digits import tiny
from rl.tasks.sum_digits import SumDigits


def chaos() -> Controller.Config:
    """Four steps of a random model with rewards by chance, so that there is a gradient from the start; a
    checkpoint after each."""
    config = tiny()
    config.description = "short run for the chaos test"
    config.warmup = None
    config.task = SumDigits.Config(num_integers=2, num_eval=8, reward="noise")
    config.loop.num_steps = 4
    config.loop.num_prompts, config.loop.num_samples = 8, 4
    config.loop.eval_every = 2
    config.loop.max_logprob_diff = 0.0
    config.trainer.num_threads = config.generator.num_threads = 1
    config.trainer.optimizer.lr = 1e-3
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.checkpoint.interval = 1
    config.recorder.num_groups = config.loop.num_prompts
    config.recorder.tokens = False
    config.timeouts.close_s = 10.0
    return config


def chaos_async() -> Controller.Config:
    """The same with generation a step ahead."""
    config = chaos()
    config.loop.max_policy_age = 1
    config.generator.on_update = "keep"
    return config
