"""Supervised warm-up on demonstrations.

A policy gradient needs a policy that is right sometimes: where all rewards are 0, it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from losses.cross_entropy import CrossEntropyLoss
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.observability.spans import add_error_context
from rl.protocols import Trainer
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import make_sample_of_demonstration
from rl.trainer_types import OptimParams
from rl.types import Problem
from rl.utils.errors import RunError


class SupervisedWarmup(Configurable):
    """Cross-entropy training with its own learning rate schedule, before the loop's first step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Length, optimizer and schedule of the warm-up; `--warmup None` turns it off."""

        num_steps: int = 300
        """Optimizer steps."""
        num_demonstrations: int = 64
        """Demonstrations of each step."""
        lr: float = 5e-3
        """Peak learning rate."""
        lr_warmup_steps: int = 20
        """Steps in which the learning rate rises linearly to the peak."""
        min_lr_ratio: float = 0.1
        """Learning rate at the end of the cosine decay, as a share of the peak."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of Adam's running means of the gradient and of its square."""
        weight_decay: float = 0.01
        """Decay of every parameter in each step as a multiple of lr."""
        max_norm: float = 1.0
        """Gradient clip norm."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_steps", "num_demonstrations", at_least=1)
            check_bounds(self, "lr", "max_norm", above=0)
            check_bounds(self, "weight_decay", "lr_warmup_steps", at_least=0)
            check_bounds(self, "min_lr_ratio", at_least=0, at_most=1)
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ValueError(f"betas={self.betas}: must be at least 0 and below 1")

        def compute_lr(self, step: int) -> float:
            """Return the learning rate of a step, counted from 0."""
            # Step 0 has a part of the peak already, since a step with lr 0 would teach nothing.
            rise = min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))
            cosine = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
            return self.lr * rise * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)

    def __init__(
        self,
        *,
        config: Config,
        trainer: Trainer,
        renderer: Renderer,
        environments: Environments,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.renderer = renderer
        self.environments = environments

    async def run(self, problems: Iterator[Problem], *, on_step: Callable[[float], None]) -> None:
        """Train on the problems' demonstrations; `on_step` gets each step's loss per token."""
        config = self.config
        for step in range(config.num_steps):
            with add_error_context(f"warm-up step {step + 1}"):
                samples = [
                    await make_sample_of_demonstration(
                        problem, self.environments, renderer=self.renderer
                    )
                    for problem in islice(problems, config.num_demonstrations)
                ]
                if len(samples) < config.num_demonstrations:
                    raise RunError(
                        f"the task's warm-up problems are used up: {len(samples)} left, of "
                        f"warmup.num_demonstrations={config.num_demonstrations}; let "
                        "`warmup_problems` repeat them, or lower warmup.num_steps"
                    )

                # The run's own optimizer settings are for a policy gradient, so each step brings
                # the warm-up's.
                params = OptimParams(
                    lr=config.compute_lr(step),
                    betas=config.betas,
                    weight_decay=config.weight_decay,
                    max_norm=config.max_norm,
                )
                result = await self.trainer.forward_backward(samples, loss=CrossEntropyLoss())
                await self.trainer.optim_step(params)
            on_step(result.loss_mean)
