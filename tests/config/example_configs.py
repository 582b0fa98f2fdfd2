"""A registry module for the tests: a trainer with nested components, and variants of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rl.config.configurable import HIDDEN, ONE_RUN, Configurable


class Optimizer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        lr: float = 1e-3
        """Peak learning rate."""
        betas: tuple[float, float] = (0.9, 0.95)
        weight_decay: float | None = None
        kind: Literal["fused", "foreach"] = "fused"
        max_norm: float = 1.0

        def __post_init__(self) -> None:
            if self.lr < 0:
                raise ValueError(f"lr must be at least 0, got {self.lr}")
            if self.max_norm < 0:
                raise ValueError(f"optimizer.max_norm={self.max_norm} is below 0")
            if self.weight_decay == -1:
                raise ValueError("weights would grow")

    def __init__(self, *, config: Config, num_parameters: int = 0) -> None:
        self.config = config
        self.num_parameters = num_parameters


class Warmup(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_steps: int = 150
        """Supervised steps before the first rollout."""


class LossFn(Protocol):
    def __call__(self, value: float) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipLoss:
    """Settings that are callable, as in `losses/`."""

    clip_low: float = 0.2
    """Lower clip distance."""
    clip_high: float = 0.2

    def __call__(self, value: float) -> float:
        return max(1 - self.clip_low, min(1 + self.clip_high, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    name: str
    flavor: str
    make: Callable[[], Any]


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
        """The optimizer."""
        loss: LossFn = field(default_factory=ClipLoss)
        reference: LossFn | None = None
        """A frozen reference; None costs nothing."""
        compile_model: bool = False
        sequence_length: int = 128


def plus_one(value: float) -> float:
    return value + 1


class Run(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str | None = field(default=None, metadata=ONE_RUN)
        dump_folder: Path = Path("outputs")
        overwrite: bool = field(default=False, metadata=ONE_RUN)
        """Discard a finished run of the same name."""
        stop_token_ids: tuple[int, ...] = ()
        trainer: Trainer.Config = field(default_factory=Trainer.Config)
        warmup: Warmup.Config | None = field(default_factory=Warmup.Config)
        """Supervised start."""
        schedule: tuple[Warmup.Config, ...] = ()
        stages: tuple[Configurable.Config, ...] = ()
        """Components of any kind."""
        spec: Spec = field(
            default_factory=lambda: Spec(name="qwen3", flavor="tiny", make=dict), metadata=HIDDEN
        )
        transform: Callable[[float], float] = field(default=plus_one, metadata=HIDDEN)
        converters: tuple[Configurable.Config, ...] = field(default=(), metadata=HIDDEN)

        def __post_init__(self) -> None:
            if self.trainer.sequence_length > 1024:
                raise ValueError(
                    f"trainer.sequence_length is {self.trainer.sequence_length}, at most 1024 fit"
                )


def tiny() -> Run.Config:
    """The smallest run."""
    return Run.Config()


def large() -> Run.Config:
    config = tiny()
    config.trainer.optimizer.lr = 3e-4
    config.trainer.sequence_length = 1024
    config.trainer.loss = ClipLoss(clip_high=0.28)
    config.schedule = (Warmup.Config(num_steps=1), Warmup.Config(num_steps=2))
    config.stages = (Warmup.Config(num_steps=7), Optimizer.Config())
    config.converters = (Warmup.Config(),)
    config.trainer.optimizer.max_norm = float("inf")
    return config


class SgdOptimizer(Optimizer):
    """A subclass in a nested place, with one more field."""

    @dataclass(kw_only=True, slots=True)
    class Config(Optimizer.Config):
        momentum: float = 0.9
        """Momentum of the running mean."""


def with_momentum() -> Run.Config:
    config = tiny()
    config.trainer.optimizer = SgdOptimizer.Config(lr=1e-2)
    return config


def unannotated():
    return Run.Config(name="unannotated")


def without_warmup() -> Run.Config:
    return Run.Config(warmup=None)


def wrong_return():
    return {"lr": 1}


def helper(path: str) -> Run.Config:
    return Run.Config(name=path)


def _private() -> Run.Config:
    return Run.Config()
