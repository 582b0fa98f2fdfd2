"""countdown: combine given numbers into an expression that equals a target."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.tasks.countdown import Countdown


def tiny() -> Controller.Config:
    """Two numbers; a model of 0.8M parameters that the run creates and warms up itself; two CPU
    cores, no GPU.
    """
    # Two small numbers make few problems: 119 of them are held out.
    task = Countdown.Config(num_numbers=2, largest=20, operations="+-", instruction="", num_eval=96)
    return sum_digits.on_task(sum_digits.tiny(), "countdown", task)


def qwen3_0_6b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_1_7b())


def qwen3_4b() -> Controller.Config:
    """Eight GPUs of 80 GB."""
    return _set_task(sum_digits.qwen3_4b())


def _set_task(config: Controller.Config) -> Controller.Config:
    task = Countdown.Config(num_numbers=4, largest=100, max_target=1000, operations="+-*/")
    return sum_digits.on_task(config, "countdown", task, max_model_len=2048, max_tokens=1536)
