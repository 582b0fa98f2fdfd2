"""Learning-rate schedules: warm-up, a plateau, decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rl.config.configurable import Configurable


class LRSchedule(Configurable):
    """Factor on the peak learning rate as a function of the step.

    A linear warm-up, a plateau, and a decay over the last `decay_ratio` of `total_steps`; afterwards the factor
    stays at `min_ratio`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warmup_steps: int = 0
        """Steps of linear warm-up; step n has n / warmup_steps of the peak."""
        decay: Literal["constant", "linear", "cosine", "sqrt"] = "constant"
        """Shape of the decay; constant does not decay."""
        decay_ratio: float = 1.0
        """Share of total_steps, at the end, over which the rate decays; never before the warm-up is over."""
        min_ratio: float = 0.0
        """Learning rate after the decay, as a share of the peak."""
        total_steps: int = 0
        """Optimizer steps of the whole run; needed for a decay, and must equal the loop's."""

        def __post_init__(self) -> None:
            _check(self)

    def __init__(self, *, config: Config) -> None:
        self.config = config
        length = round(config.decay_ratio * config.total_steps)
        self.decay_start = max(config.warmup_steps, config.total_steps - length)

    def factor(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.decay == "constant" or step < self.decay_start:
            return 1.0
        if step >= config.total_steps:
            return config.min_ratio
        progress = (step - self.decay_start) / (config.total_steps - self.decay_start)
        shape = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "sqrt": 1.0 - math.sqrt(progress),
        }[config.decay]
        return config.min_ratio + (1.0 - config.min_ratio) * shape


def _check(config: LRSchedule.Config) -> None:
    for name in ("warmup_steps", "total_steps"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 0")
    for name in ("decay_ratio", "min_ratio"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"{name}={getattr(config, name)}: must be between 0 and 1")
    if config.decay == "constant":
        if (config.decay_ratio, config.min_ratio, config.total_steps) != (1.0, 0.0, 0):
            raise ValueError(
                "decay_ratio, min_ratio and total_steps have no effect with decay='constant': must be 1, 0 and 0, "
                "or decay 'linear', 'cosine' or 'sqrt'"
            )
        return
    num_decay = round(config.decay_ratio * config.total_steps)
    if config.total_steps <= config.warmup_steps or not num_decay or config.min_ratio == 1.0:
        raise ValueError(
            f"decay={config.decay!r} with total_steps={config.total_steps}, warmup_steps={config.warmup_steps}, "
            f"decay_ratio={config.decay_ratio}, min_ratio={config.min_ratio}: nothing would decay; total_steps "
            "must be the steps of the run, above warmup_steps, decay_ratio above 0, and min_ratio below 1"
        )


def check_total_steps(config: LRSchedule.Config, *, num_steps: int, num_minibatches: int) -> None:
    """Raise ValueError for a decay whose `total_steps` differ from the loop's optimizer steps."""
    in_loop = num_steps * num_minibatches
    if config.decay != "constant" and num_steps and config.total_steps != in_loop:
        raise ValueError(
            f"trainer.lr_scheduler.total_steps={config.total_steps} with decay={config.decay!r}: must be "
            f"{in_loop}, the optimizer steps of the run: loop.num_steps={num_steps} x "
            f"loop.num_minibatches={num_minibatches}"
        )
