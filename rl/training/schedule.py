"""Learning-rate schedules: warm-up, a plateau, decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rl.config.configurable import Configurable


class LRSchedule(Configurable):
    """The factor on the peak learning rate, a function of the step alone.

    Over `total_steps`: linear warm-up, the peak, then decay over the last `decay_ratio` of
    the steps; the factor stays at `min_ratio` from then on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warmup_steps: int = 0
        """Steps of linear warm-up; step n of them has n / warmup_steps of the peak."""
        decay: Literal["constant", "linear", "cosine", "sqrt"] = "constant"
        """Shape of the decay; constant has none."""
        decay_ratio: float = 1.0
        """Share of total_steps that decay, at the end; never before the warm-up is over."""
        min_ratio: float = 0.0
        """Learning rate after the decay, as a share of the peak."""
        total_steps: int = 0
        """Optimizer steps of the whole run; needed for a decay, and checked against the loop's in a run."""

        def __post_init__(self) -> None:
            _check(self)

    def __init__(self, *, config: Config) -> None:
        _check(config)
        self.config = config
        length = round(config.decay_ratio * config.total_steps)
        self.decay_start = max(config.warmup_steps, config.total_steps - length)

    def factor(self, step: int) -> float:
        """Of the step with that number, counted from 0."""
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
        for name, default in (("decay_ratio", 1.0), ("min_ratio", 0.0), ("total_steps", 0)):
            if getattr(config, name) != default:
                raise ValueError(
                    f"{name}={getattr(config, name)} has no effect with decay='constant': must be {default}, "
                    "or decay 'linear', 'cosine' or 'sqrt'"
                )
        return
    if config.total_steps <= config.warmup_steps:
        raise ValueError(
            f"total_steps={config.total_steps}: decay={config.decay!r} needs the steps of the run, more "
            f"than warmup_steps={config.warmup_steps}"
        )
    if config.min_ratio == 1.0:
        raise ValueError(f"min_ratio=1.0: decay={config.decay!r} to the peak is none: must be below 1")
    if not round(config.decay_ratio * config.total_steps):
        raise ValueError(
            f"decay_ratio={config.decay_ratio}: decay={config.decay!r} over no step of "
            f"total_steps={config.total_steps}: must be larger, or decay 'constant'"
        )


def check_total_steps(config: LRSchedule.Config, *, num_steps: int, num_minibatches: int) -> None:
    """Raise ValueError for a decay over another number of steps than those of the loop."""
    in_loop = num_steps * num_minibatches
    if config.decay != "constant" and num_steps and config.total_steps != in_loop:
        raise ValueError(
            f"trainer.lr_scheduler.total_steps={config.total_steps} with decay={config.decay!r}: must be "
            f"{in_loop}, the optimizer steps of the run: loop.num_steps={num_steps} x "
            f"loop.num_minibatches={num_minibatches}"
        )
