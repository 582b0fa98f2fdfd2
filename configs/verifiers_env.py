"""Environments of the `verifiers` package; choose another with `--task.taskset my-env`."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.rollouts.renderer import RendererConfig
from rl.tasks.verifiers_task import VerifiersTask


def qwen3_0_6b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_1_7b())


def _set_task(config: Controller.Config) -> Controller.Config:
    task = VerifiersTask.Config(taskset="gsm8k-v1", num_eval=256)
    sum_digits.on_task(
        config, "an environment of verifiers", task, max_model_len=4096, max_tokens=1024
    )
    # Environments may have several turns, and Qwen3's own template would not keep their tokens.
    config.renderer = RendererConfig(kind="qwen3")
    return config
