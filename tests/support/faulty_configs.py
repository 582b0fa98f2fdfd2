"""Registry functions for short runs, some with a planted fault."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from actors.agents import AgentEndpoint
from actors.controller import Controller
from configs.sum_digits import tiny, tiny_moe
from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.agents.task import AgentTask
from rl.rollouts.renderer import RendererConfig
from rl.tasks.calculation import Calculation
from rl.tasks.sum_digits import SumDigits
from rl.training.checkpoints.checkpointer import Checkpointer


def short() -> Controller.Config:
    """Train a random model for three steps without a warm-up."""
    return _shorten(tiny())


def mixture() -> Controller.Config:
    """Train a random mixture of experts on random rewards, with a bias that balances its load."""
    config = _shorten(tiny_moe())
    config.task = SumDigits.Config(num_integers=2, num_eval=8, reward="noise")
    config.trainer.experts.load_balance_rate = 0.001
    return config


def _shorten(config: Controller.Config) -> Controller.Config:
    config.warmup = None
    config.task = SumDigits.Config(num_integers=2, num_eval=8)
    config.loop.num_steps = 3
    config.loop.groups_per_batch, config.loop.group_size = 8, 4
    config.loop.eval_every = 0
    config.trainer.num_threads = config.generator.num_threads = 1
    config.timeouts.close_s = 10.0
    return config


def chaos() -> Controller.Config:
    """Train four batch-invariant steps on random rewards, which give a gradient from the start,
    with a checkpoint after each step."""
    config = short()
    config.task = SumDigits.Config(num_integers=2, num_eval=8, reward="noise")
    config.loop.num_steps, config.loop.eval_every = 4, 2
    config.loop.max_logprob_diff = 0.0
    # A script takes problems in order, also those whose rewards are equal.
    config.loop.drop_zero_advantage_groups = False
    config.limits.enable = False
    config.trainer.optimizer.lr = 1e-3
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.checkpoint.interval = 1
    config.recorder.num_groups = config.loop.groups_per_batch
    config.recorder.tokens = False
    return config


@dataclass(kw_only=True, slots=True)
class NaNLoss(GRPOLoss):
    """Loss that is NaN from the second call on."""

    num_calls: int = 0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.num_calls += 1
        output = GRPOLoss.__call__(self, inputs)
        if self.num_calls < 2:
            return output
        return replace(output, loss_sum=output.loss_sum * math.nan)


class SlowDisk(Checkpointer):
    """Checkpointer with slow writes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Checkpointer.Config):
        pass

    def _write(self, *args: Any) -> None:
        time.sleep(4.0)
        super()._write(*args)


def nan_loss() -> Controller.Config:
    """Fail while the checkpoint of the step before is being written, for longer than the actors'
    exit limit."""
    config = short()
    config.trainer.loss = NaNLoss()
    config.trainer.checkpoint = SlowDisk.Config(interval=1, async_mode="async")
    config.timeouts.close_s = 1.0
    return config


def agents() -> Controller.Config:
    """Train on an agent whose episodes have three branches, with random rewards, and a checkpoint
    after each of three steps."""
    config = chaos()
    config.task = AgentTask.Config(
        problems=Calculation.Config(num_products=5, num_eval=4, reward="noise"),
        function="examples.agents.compacting:solve",
    )
    config.agents = AgentEndpoint.Config(announces_tools=False)
    config.renderer = RendererConfig(kind="raw")
    config.loop.num_steps, config.loop.eval_every = 3, 0
    config.loop.groups_per_batch, config.loop.group_size = 2, 4
    config.loop.sampling.max_tokens = 12
    config.generator.max_model_len = 256
    config.recorder.tokens = True
    return config
