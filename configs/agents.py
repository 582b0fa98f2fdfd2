"""Agents of anybody, unmodified: relay trains the model behind their URL (docs/agents.md)."""

from __future__ import annotations

from actors.agents import AgentEndpoint
from actors.controller import Controller
from configs import sum_digits
from rl.agents.task import AgentTask
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.renderer import RendererConfig
from rl.tasks.calculation import Calculation


def calculator_agent() -> Controller.Config:
    """An agent with a calculator, on the `openai` package, and a model of 0.8M parameters; two CPU
    cores, no GPU.
    """
    return _make_tiny(
        AgentTask.Config(
            problems=Calculation.Config(guesses=0.6),
            function="examples.agents.calculator:solve",
        )
    )


def compacting_agent() -> Controller.Config:
    """The same with four products, whose history is summed up after three turns, and a
    sub-agent.
    """
    config = _make_tiny(
        AgentTask.Config(
            problems=Calculation.Config(num_products=4, guesses=0.6),
            function="examples.agents.compacting:solve",
        )
    )
    # Four products make a demonstration four times as long.
    config.warmup = SupervisedWarmup.Config(num_steps=300, num_demonstrations=10)
    config.loop.groups_per_batch = 8
    return config


def noise() -> Controller.Config:
    """The control experiment: random rewards, from which nothing can be learned."""
    config = calculator_agent()
    assert isinstance(config.task, AgentTask.Config)
    assert isinstance(config.task.problems, Calculation.Config)
    config.task.problems.reward = "noise"
    return config


def _make_tiny(task: AgentTask.Config) -> Controller.Config:
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters behind an agent, on a CPU"
    config.task = task
    # The tiny model knows its tool from the warm-up, and no template around the words.
    config.agents = AgentEndpoint.Config(announces_tools=False)
    config.renderer = RendererConfig(kind="raw")
    config.warmup = SupervisedWarmup.Config(num_steps=300, num_demonstrations=32)
    config.trainer.optimizer.lr = 1e-4
    config.loop.num_steps = 20
    config.loop.groups_per_batch = 16
    config.loop.sampling.max_tokens = 112
    config.loop.eval_every = 5
    config.generator.max_model_len = 512
    return config
