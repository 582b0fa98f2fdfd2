"""Supervised steps on demonstrations, through the same `forward_backward` as GRPO.

A policy gradient needs a policy that is sometimes right: this makes the starting point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from losses.cross_entropy import CrossEntropyLoss
from rl.config.configurable import Configurable
from rl.errors import RunError, naming
from rl.protocols import Learner
from rl.rollouts.demonstrations import demonstrated
from rl.rollouts.renderer import Renderer
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import OptimParams, Problem


class SupervisedWarmup(Configurable):
    """Cross-entropy steps with a schedule of their own, owned by the controller."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_steps: int = 300
        """Optimizer steps."""
        num_demonstrations: int = 64
        """Demonstrations a step."""
        lr: float = 5e-3
        """Peak learning rate."""
        lr_warmup_steps: int = 20
        """Steps in which the learning rate rises linearly to its peak."""
        min_lr_ratio: float = 0.1
        """Learning rate at the end of the cosine decay, as a share of the peak."""
        betas: tuple[float, float] = (0.9, 0.95)
        weight_decay: float = 0.01
        max_norm: float = 1.0
        """Gradient clip norm."""

        def __post_init__(self) -> None:
            if self.num_steps < 1 or self.num_demonstrations < 1:
                raise ValueError(
                    f"num_steps={self.num_steps}, num_demonstrations={self.num_demonstrations}: both must be "
                    "at least 1 (no warm-up at all: --warmup None)"
                )

            if not (self.lr > 0 and self.max_norm > 0 and self.weight_decay >= 0):
                raise ValueError(
                    f"lr={self.lr}, max_norm={self.max_norm}, weight_decay={self.weight_decay}: the first "
                    "two must be above 0, the last at least 0"
                )
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ValueError(f"betas={self.betas}: each must be at least 0 and below 1")
            if not (self.lr_warmup_steps >= 0 and 0 <= self.min_lr_ratio <= 1):
                raise ValueError(
                    f"lr_warmup_steps={self.lr_warmup_steps}, min_lr_ratio={self.min_lr_ratio}: must be at "
                    "least 0, and between 0 and 1"
                )

        def lr_at(self, step: int) -> float:
            """Learning rate of step 0, 1, ..."""
            rise = min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))
            cosine = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
            return self.lr * rise * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)

    def __init__(
        self,
        *,
        config: Config,
        learner: Learner,
        renderer: Renderer,
        environments: TriedEnvironments,
    ) -> None:
        """`environments` are those of the demonstrated problems."""
        self.config = config
        self.learner = learner
        self.renderer = renderer
        self.environments = environments

    async def run(self, problems: Iterator[Problem], *, on_step: Callable[[float], None]) -> None:
        """`on_step(loss per token)` is called after each step."""
        config = self.config
        for step in range(config.num_steps):
            with naming(f"warm-up step {step + 1}"):
                samples = [
                    await demonstrated(problem, self.environments, renderer=self.renderer)
                    for problem in islice(problems, config.num_demonstrations)
                ]
            if len(samples) < config.num_demonstrations:
                raise RunError(
                    f"the task's warm-up problems are used up at step {step + 1}: {len(samples)} left, of "
                    f"warmup.num_demonstrations={config.num_demonstrations} that a step takes; let "
                    "`warmup_problems` repeat them, or lower warmup.num_steps"
                )
            params = OptimParams(
                lr=config.lr_at(step),
                betas=config.betas,
                weight_decay=config.weight_decay,
                max_norm=config.max_norm,
            )
            with naming(f"warm-up step {step + 1}"):
                result = await self.learner.forward_backward(samples, loss=CrossEntropyLoss())
                await self.learner.optim_step(params)
            on_step(result.loss_mean)
