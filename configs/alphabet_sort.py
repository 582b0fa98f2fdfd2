"""alphabet-sort: keep a list of words sorted over three turns."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.renderer import RendererConfig
from rl.tasks.alphabet_sort import INSTRUCTION, AlphabetSort


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that the run creates and warms up itself; two CPU cores, no
    GPU.
    """
    task = AlphabetSort.Config(num_words=(2, 1, 1), letters="abcdefghijkl", haste=0.8)
    config = sum_digits.on_task(
        sum_digits.tiny(), "alphabet-sort", task, max_model_len=160, max_tokens=12
    )
    config.warmup = SupervisedWarmup.Config(num_steps=300, num_demonstrations=48)
    config.trainer.optimizer.lr = 8e-5
    config.loop.advantage.scale = "group_std"
    config.loop.num_steps = 40
    return config


def tiny_noise() -> Controller.Config:
    """The control experiment: random rewards, from which nothing can be learned."""
    return sum_digits.noise(tiny())


def qwen3_0_6b() -> Controller.Config:
    """One GPU of 80 GB."""
    task = AlphabetSort.Config(num_words=(8, 4, 4), num_letters=4, instruction=INSTRUCTION)
    config = sum_digits.on_task(
        sum_digits.qwen3_0_6b(), "alphabet-sort", task, max_model_len=4096, max_tokens=1024
    )
    # Qwen3's own template removes the reasoning from earlier replies, so a conversation would not
    # keep its tokens.
    config.renderer = RendererConfig(kind="qwen3")
    return config
