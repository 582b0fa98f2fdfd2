"""Runs on alphabet-sort, three turns each."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.rollouts.renderer import RendererConfig
from rl.supervised import SupervisedWarmup
from rl.tasks.alphabet_sort import INSTRUCTION, AlphabetSort


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters on alphabet-sort, three turns each, on a CPU"
    config.task = AlphabetSort.Config(num_words=(2, 1, 1), letters="abcdefghijkl", haste=0.8)
    config.warmup = SupervisedWarmup.Config(num_steps=300, num_demonstrations=48)
    config.trainer.optimizer.lr = 8e-5
    config.loop.advantage.scale = "group_std"
    config.loop.num_steps = 40
    config.loop.sampling.max_tokens = 12
    config.generator.max_model_len = 160
    return config


def tiny_noise() -> Controller.Config:
    """The control: rewards drawn by chance, from which nothing can be learnt."""
    config = tiny()
    config.description = "control: tiny with a reward of noise"
    assert isinstance(config.task, AlphabetSort.Config)
    config.task.reward = "noise"
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    config = sum_digits.qwen3_0_6b()
    config.description = "Qwen3-0.6B on alphabet-sort, on GPUs"
    config.task = AlphabetSort.Config(num_words=(8, 4, 4), num_letters=4, instruction=INSTRUCTION)
    # Qwen3's own template takes the thoughts out of earlier replies: no conversation goes on token by token.
    config.renderer = RendererConfig(kind="qwen3")
    config.generator.max_model_len = 4096
    config.loop.sampling.max_tokens = 1024
    return config
