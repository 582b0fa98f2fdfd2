"""Agents of anybody, unmodified: relay trains the model behind their URL (docs/agents.md)."""

from __future__ import annotations

from pathlib import Path

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


def smolagents_agent() -> Controller.Config:
    """smolagents' ToolCallingAgent in an environment of its own
    (examples/agents/smolagents_tools.py), and Qwen3-0.6B; one GPU of 80 GB.
    """
    config = sum_digits.qwen3_0_6b()
    config.description = "Qwen3-0.6B behind smolagents, on GPUs"
    script = Path("examples/agents/smolagents_tools.py").absolute()
    python = Path(".venv-agents/smolagents/bin/python").absolute()
    config.task = AgentTask.Config(
        problems=Calculation.Config(num_digits=4, num_eval=128),
        command=(str(python), str(script), "{question}"),
        # The answer is what the agent prints at its end, not the model's last reply.
        reward="rl.tasks.calculation:reward_of_output",
    )
    config.agents = AgentEndpoint.Config()
    config.renderer = RendererConfig(kind="qwen3")
    config.loop.episode.max_turns = 8
    config.loop.max_failed_rewards = 0.2
    config.loop.sampling.max_tokens = 1024
    config.generator.max_model_len = 8192
    config.trainer.training.max_tokens_per_microbatch = 8192
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
    # Foreign code may fail now and then.
    config.loop.max_failed_rewards = 0.1
    config.generator.max_model_len = 512
    return config
