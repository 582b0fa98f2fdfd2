"""Datasets of reasoning-gym by name, on GPUs; another one: `--task.dataset countdown`."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.tasks.reasoning_gym_task import ReasoningGym


def tiny() -> Controller.Config:
    """A model of 0.8M parameters, warmed up on bare answers; two CPU cores, no GPU."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters on reasoning-gym's chain_sum, on a CPU"
    config.task = ReasoningGym.Config(
        dataset="chain_sum",
        settings={"max_terms": 2, "max_digits": 1},
        num_eval=32,
        answer_in="whole",
        system="",
    )
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    return _reasoning(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """Three GPUs: two train, one generates."""
    return _reasoning(sum_digits.qwen3_1_7b())


def _reasoning(config: Controller.Config) -> Controller.Config:
    config.description = config.description.replace("sum-digits", "reasoning-gym")
    config.task = ReasoningGym.Config(dataset="basic_arithmetic", num_eval=256)
    config.generator.max_model_len = 2048
    config.loop.sampling.max_tokens = 1536
    return config
