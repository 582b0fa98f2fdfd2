"""Environments of the `verifiers` package, on GPUs; another one: `--task.taskset my-env`."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.rollouts.renderer import RendererConfig
from rl.tasks.verifiers_environment import START_S
from rl.tasks.verifiers_task import VerifiersTask


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    return _verifiers(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """Three GPUs: two train, one generates."""
    return _verifiers(sum_digits.qwen3_1_7b())


def _verifiers(config: Controller.Config) -> Controller.Config:
    config.description = config.description.replace("sum-digits", "an environment of verifiers")
    config.task = VerifiersTask.Config(taskset="gsm8k-v1", num_eval=256)
    # Environments may have several turns, which Qwen3's own template does not keep token by token.
    config.renderer = RendererConfig(kind="qwen3")
    config.generator.max_model_len = 4096
    config.loop.sampling.max_tokens = 1024
    # The first replies also wait for the environment's tool servers.
    config.loop.episode.step_timeout_s = START_S + 60.0
    return config
