"""Whole runs of real training in this process, in seconds each, and the faults planted in them.

The task: a letter is asked, its capital is right (`k` -> `K!!`). A model of 60,000 parameters is warmed up on
demonstrations of which half are right, and which go on with some `!`, and sometimes a `?`; GRPO then
learns from rewards alone, over the loop of every run, and leaves a run's folder.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from losses.cross_entropy import CrossEntropyLoss
from rl.config.json import to_dict
from rl.local import LocalBackend
from rl.loop.loop import Loop, RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.models.decoder import Attention, Decoder, FeedForward, RoPE, TransformerBlock
from rl.models.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.models.spec import ModelSpec
from rl.models.tokenizer import open_tokenizer
from rl.observability.metrics import MetricsWriter
from rl.observability.recorder import Recorder, RecorderConfig
from rl.observability.run_folder import RunFolder
from rl.rollouts.episode import Sampling
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.samples import demonstration_sample
from rl.tasks.generated import GeneratedTask
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import Message, OptimParams, Problem, Rollout
from tests.support.fakes import RubricRewarder

ASKED = "abcdefgh"
MAX_TOKENS = 16
"""Most tokens of a reply."""


def small_spec() -> ModelSpec:
    """Return a model of two layers of width 48 over bytes."""
    model = Decoder.Config(
        vocab_size=320,
        dim=48,
        num_layers=2,
        tie_embeddings=True,
        init_std=0.06,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, head_dim=12),
            feed_forward=FeedForward.Config(hidden_dim=96),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=64),
    )
    return replace(model_registry("tiny"), model=model)


class Capitals(GeneratedTask):
    """Task that shows two letters and asks for the capital of the first; the rest of the reply is ignored."""

    def draw(self, generator: random.Random) -> Problem:
        question = generator.choice(ASKED) + generator.choice(string.ascii_lowercase)
        right = question[0].upper()
        said = right if generator.random() < 0.4 else generator.choice(ASKED.upper())
        ends = "!" * min(int(generator.expovariate(0.7)), 10) + ("?" if generator.random() < 0.25 else "")
        return Problem(id=question, question=question, answer=right, demonstration=said + ends)


def is_right(rollout: Rollout) -> bool:
    return rollout.text.rstrip("!?") == rollout.prompt.problem.answer


def step_of(rollout: Rollout) -> int:
    """Return the step that trains on the rollout when generation and training alternate."""
    return int(rollout.completion.policy_versions.max()) + 1


def answer(rollout: Rollout) -> float:
    return float(is_right(rollout))


HEALTHY = Rubric(criteria=(Criterion(name="answer", function=answer),), correct=is_right)


def warm_up(folder: Path, *, num_steps: int = 150) -> Path:
    """Warm up a model and return its Hugging Face folder."""
    torch.manual_seed(0)
    start = write_random_model(folder / "random", spec=small_spec(), seed=0)
    tokenizer, ends = open_tokenizer(start)
    renderer = make_renderer(RendererConfig(kind="raw"), tokenizer=tokenizer, stop_token_ids=ends)
    problems = Capitals.Config(num_eval=20).build().warmup_problems(seed=0)

    async def train() -> None:
        config = TrainingEngine.Config(training=TrainingConfig(max_tokens_per_microbatch=4096))
        async with LocalBackend(config, spec=small_spec(), hf_assets_path=str(start), device="cpu") as local:
            for step in range(num_steps):
                samples = [
                    demonstration_sample(
                        renderer.opening([Message(role="user", content=p.question)]),
                        renderer.reply(p.demonstrations[0]),
                    )
                    for p in islice(problems, 64)
                ]
                await local.forward_backward(samples, loss=CrossEntropyLoss())
                await local.optim_step(OptimParams(lr=1e-2 * (1 - step / num_steps), weight_decay=0.0))
            await local.export_hf(str(folder / "warm"), dtype="float32")

    asyncio.run(train())
    return folder / "warm"


class StaleBackend(LocalBackend):
    """Backend whose generator keeps its weights after version `last_fresh` but reports newer versions."""

    last_fresh: int | None = None

    def _serve(self, policy_version: int) -> None:
        if self.last_fresh is None or policy_version <= self.last_fresh:
            super()._serve(policy_version)
            return
        self._served_version = policy_version
        for version in [v for v in self._pushed if v <= policy_version]:
            del self._pushed[version]


def leave_run(
    start: Path, folder: RunFolder, *, num_steps: int, rubric: Rubric = HEALTHY, last_fresh: int | None = None
) -> None:
    """Train a warmed-up model in the run's folder; `last_fresh` is the last version that reaches the generator."""
    torch.manual_seed(0)
    asyncio.run(_train(start, folder, num_steps=num_steps, rubric=rubric, last_fresh=last_fresh))
    folder.mark_finished()


async def _train(
    start: Path, folder: RunFolder, *, num_steps: int, rubric: Rubric, last_fresh: int | None
) -> None:
    engine = TrainingEngine.Config(
        optimizer=Optimizer.Config(lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.0),
        training=TrainingConfig(max_tokens_per_microbatch=4096, max_norm=1.0),
    )
    config = Loop.Config(
        num_steps=num_steps,
        groups_per_batch=16,
        group_size=8,
        eval_every=10,
        sampling=Sampling(max_tokens=MAX_TOKENS),
    )
    told = {"module": __name__, "config": "small", "values": {"loop": to_dict(config)}}
    folder.config_json.write_text(json.dumps(told))
    tokenizer, ends = open_tokenizer(start)
    backend = StaleBackend(engine, spec=small_spec(), hf_assets_path=str(start), device="cpu")
    backend.last_fresh = last_fresh
    async with backend as local:
        with closing(MetricsWriter(folder.metrics)) as metrics:
            loop: Loop = config.build(
                trainer=local,
                publisher=local,
                rollouts=RolloutSetup(
                    generator=local,
                    rewarder=RubricRewarder(rubric=rubric),
                    renderer=make_renderer(
                        RendererConfig(kind="raw"), tokenizer=tokenizer, stop_token_ids=ends
                    ),
                    task=Capitals.Config(num_eval=20).build(),
                    max_sequence_tokens=64,
                    seed=0,
                ),
                sinks=[metrics],
                checkpoints=StepCheckpoints(
                    trainer=local, config=CheckpointConfig(enable=False), folder=str(folder.checkpoints)
                ),
                recorder=Recorder(folder.rollouts, config=RecorderConfig()),
            )
            await loop.run()


# Rewards with a fault from a given step on


RewardFn = Callable[[Rollout], float]


def faulty_from(step: int, fault: RewardFn, sound: RewardFn = answer) -> RewardFn:
    """Return a reward function that is sound before `step` and faulty from then on."""

    def reward(rollout: Rollout) -> float:
        return fault(rollout) if step_of(rollout) >= step else sound(rollout)

    return reward
