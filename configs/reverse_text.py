"""reverse-text: write a text backwards."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.loop.warmup import SupervisedWarmup
from rl.tasks.reverse_text import INSTRUCTION, ReverseText


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that the run creates and warms up itself; two CPU cores, no GPU."""
    config = sum_digits.on_task(
        sum_digits.tiny(), "reverse-text", ReverseText.Config(haste=0.8), max_tokens=12
    )
    config.warmup = SupervisedWarmup.Config(num_steps=250)
    config.trainer.optimizer.lr = 6e-5
    config.loop.num_steps = 50
    return config


def tiny_noise() -> Controller.Config:
    """The control experiment: random rewards, from which nothing can be learned."""
    return sum_digits.noise(tiny())


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one for training, one for generation."""
    task = ReverseText.Config(num_letters=(8, 24), instruction=INSTRUCTION)
    return sum_digits.on_task(sum_digits.qwen3_0_6b(), "reverse-text", task)
