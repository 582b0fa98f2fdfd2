"""reverse-text: write a text backwards."""

from __future__ import annotations

from collections.abc import Callable

from actors.controller import Controller
from configs import gpu, sum_digits
from rl.loop.warmup import SupervisedWarmup
from rl.tasks.reverse_text import INSTRUCTION, ReverseText


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that the run creates and warms up itself; two CPU cores, no
    GPU.
    """
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


def _on(layout: gpu.Layout) -> Callable[[], Controller.Config]:
    # A function and no config: each call gives a fresh config, which callers may edit.
    def config() -> Controller.Config:
        task = ReverseText.Config(num_letters=(8, 24), instruction=INSTRUCTION)
        return gpu.config(
            layout, name="reverse-text", task=task, max_model_len=1024, max_tokens=768
        )

    return config


qwen3_0_6b_lora_24gb = _on(gpu.QWEN3_0_6B_LORA_24GB)
qwen3_0_6b_24gb = _on(gpu.QWEN3_0_6B_24GB)
qwen3_0_6b = _on(gpu.QWEN3_0_6B)
qwen3_1_7b = _on(gpu.QWEN3_1_7B)
qwen3_4b_lora = _on(gpu.QWEN3_4B_LORA)
qwen3_4b = _on(gpu.QWEN3_4B)
qwen3_8b = _on(gpu.QWEN3_8B)
qwen3_14b = _on(gpu.QWEN3_14B)
qwen3_30b_a3b = _on(gpu.QWEN3_30B_A3B)
