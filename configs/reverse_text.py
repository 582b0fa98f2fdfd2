"""Runs on reverse-text."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.supervised import SupervisedWarmup
from rl.tasks.reverse_text import INSTRUCTION, ReverseText


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters on reverse-text, on a CPU"
    config.task = ReverseText.Config(haste=0.8)
    config.warmup = SupervisedWarmup.Config(num_steps=250)
    config.trainer.optimizer.lr = 6e-5
    config.loop.num_steps = 50
    config.loop.sampling.max_tokens = 12
    return config


def tiny_noise() -> Controller.Config:
    """The control: rewards drawn by chance, from which nothing can be learnt."""
    config = tiny()
    config.description = "control: tiny with a reward of noise"
    assert isinstance(config.task, ReverseText.Config)
    config.task.reward = "noise"
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    config = sum_digits.qwen3_0_6b()
    config.description = "Qwen3-0.6B on reverse-text, on GPUs"
    config.task = ReverseText.Config(num_letters=(8, 24), instruction=INSTRUCTION)
    return config
