"""Runs on countdown: an expression of given numbers that equals a target."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.tasks.countdown import Countdown


def tiny() -> Controller.Config:
    """Two numbers; a model of 0.8M parameters that this run makes and warms up itself; two CPU cores."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters on countdown, on a CPU"
    # So few numbers make few problems: 119 of them are held out.
    config.task = Countdown.Config(num_numbers=2, largest=20, operations="+-", instruction="", num_eval=96)
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    return _countdown(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """Three GPUs: two train, one generates."""
    return _countdown(sum_digits.qwen3_1_7b())


def qwen3_4b() -> Controller.Config:
    """Five GPUs: four train, one generates."""
    return _countdown(sum_digits.qwen3_4b())


def _countdown(config: Controller.Config) -> Controller.Config:
    config.description = config.description.replace("sum-digits", "countdown")
    config.task = Countdown.Config(num_numbers=4, largest=100, max_target=1000, operations="+-*/")
    config.generator.max_model_len = 2048
    config.loop.sampling.max_tokens = 1536
    return config
