"""Datasets of reasoning-gym; choose another with `--task.dataset countdown`."""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.tasks.reasoning_gym_task import ReasoningGym


def tiny() -> Controller.Config:
    """A model of 0.8M parameters, warmed up on plain answers; two CPU cores, no GPU."""
    task = ReasoningGym.Config(
        dataset="chain_sum",
        settings={"max_terms": 2, "max_digits": 1},
        num_eval=32,
        answer_in="whole",
        system="",
    )
    return sum_digits.on_task(sum_digits.tiny(), "reasoning-gym's chain_sum", task)


def qwen3_0_6b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """One GPU of 80 GB."""
    return _set_task(sum_digits.qwen3_1_7b())


def _set_task(config: Controller.Config) -> Controller.Config:
    task = ReasoningGym.Config(dataset="basic_arithmetic", num_eval=256)
    return sum_digits.on_task(config, "reasoning-gym", task, max_model_len=2048, max_tokens=1536)
