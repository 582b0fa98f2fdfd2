"""Registry functions for runs with a planted fault, and their faulty components."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from actors.controller import Controller
from actors.trainer import PolicyTrainer
from configs.sum_digits import tiny
from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import SumDigits, is_correct
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.types import Rollout


def short() -> Controller.Config:
    """Train a random model for three steps without a warm-up."""
    config = tiny()
    config.warmup = None
    config.task = SumDigits.Config(num_integers=2, num_eval=8)
    config.loop.num_steps = 3
    config.loop.groups_per_batch, config.loop.group_size = 8, 4
    config.loop.eval_every = 0
    config.trainer.num_threads = config.generator.num_threads = 1
    config.timeouts.close_s = 10.0
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

    def _publish(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(4.0)
        super()._publish(*args, **kwargs)


def nan_loss() -> Controller.Config:
    """Fail while the checkpoint of the step before is being written, for longer than the actors' exit
    limit."""
    config = short()
    config.trainer.loss = NaNLoss()
    config.trainer.checkpoint = SlowDisk.Config(interval=1, async_mode="async")
    config.timeouts.close_s = 1.0
    return config


class FrozenPushTrainer(PolicyTrainer):
    """Trainer that always pushes the initial weights, as a broken weight sync does."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        pass

    def make_engine(self, hf_assets_path: str) -> TrainingEngine:
        return _FrozenPush(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            failure_folder=self.failure_folder,
        )


class _FrozenPush(TrainingEngine):
    first: dict[str, torch.Tensor] | None = None

    def model_state_dict(self) -> dict[str, torch.Tensor]:
        if self.first is None:
            self.first = {name: t.clone() for name, t in super().model_state_dict().items()}
        return self.first


def broken_sync() -> Controller.Config:
    """Train on a random reward, which gives a gradient to random weights too."""
    config = short()
    assert isinstance(config.task, SumDigits.Config)
    config.task.reward = "noise"
    config.loop.num_steps = 6
    config.loop.max_logprob_diff = math.inf
    config.parity.enable = False
    config.trainer.lr_scheduler.warmup_steps = 0
    shared = {f.name: getattr(config.trainer, f.name) for f in fields(config.trainer)}
    config.trainer = FrozenPushTrainer.Config(**shared)
    return config


class NaNAtOnce(SumDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        pass

    def rubric(self, *, seed: int) -> Rubric:
        return Rubric(criteria=(Criterion(name="broken", function=_nan),), correct=is_correct)


def _nan(rollout: Rollout) -> float:
    return math.nan


def nan_reward() -> Controller.Config:
    config = short()
    config.task = NaNAtOnce.Config(num_integers=2, num_eval=8)
    return config


__all__: Sequence[str] = ["broken_sync", "nan_loss", "nan_reward", "short"]
