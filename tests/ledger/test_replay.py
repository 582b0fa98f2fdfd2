"""A step that is trained again: what a run must have done otherwise than its config says is named,
also where its ledger is in itself right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from configs import sum_digits
from rl.config.json import name_code, to_dict
from rl.ledger.config import LedgerConfig
from rl.ledger.replay import find_step, make_groups, replay
from rl.ledger.rewards import Regraded, grade_again
from rl.ledger.writer import Ledger
from rl.local import LocalBackend
from rl.loop.config import LoopConfig
from rl.loop.ledger import StepLedger
from rl.models.files.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.rollouts.episode import Sampling
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import SumDigits
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import LRSchedule, Optimizer
from tests.support.loops import make_loop
from tests.training.parts import small_spec

CONFIG = TrainingEngine.Config(
    optimizer=Optimizer.Config(lr=1e-3),
    lr_scheduler=LRSchedule.Config(warmup_steps=10),
    loss=sum_digits.tiny().trainer.loss,
)
TASK = SumDigits.Config(num_integers=2, reward="noise").build()
LOOP: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_batch": 2,
    "group_size": 3,
    "max_logprob_diff": 1e-3,
}
Plant = Callable[[LocalBackend, Any], None]


@cache
def build_renderer() -> Renderer:
    """Return a renderer that reads the bytes of a random model, unlike that of the fakes."""
    with TemporaryDirectory() as folder:
        build_byte_tokenizer(folder)
        tokenizer, stop_token_ids = open_tokenizer(Path(folder))
    return make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=stop_token_ids)


def train(folder: Path, plant: Plant = lambda local, loop: None) -> LoopConfig:
    """Train two steps in a folder with a fault of the code, and return the loop's config."""

    async def run() -> LoopConfig:
        async with LocalBackend(
            CONFIG, spec=small_spec(), hf_assets_path=None, device="cpu"
        ) as local:
            loop, _ = make_loop(
                local,
                checkpoint=CheckpointConfig(interval=1),
                task=TASK,
                renderer=build_renderer(),
                rubric=TASK.rubric(seed=0),
                sampling=Sampling(max_tokens=8),
                **LOOP,
            )
            loop.checkpoints.folder = str(folder / "checkpoints")
            loop.ledger = StepLedger(
                ledger=Ledger(folder / "ledger", config=LedgerConfig(enable=True)),
                config=loop.config,
                loss={"class": name_code(type(CONFIG.loss)), **to_dict(CONFIG.loss)},
            )
            plant(local, loop)
            await loop.run()
            return loop.config

    return asyncio.run(run())


def check_again(folder: Path, config: LoopConfig) -> Any:
    """Return what became of step 2, and of its rewards."""
    step = find_step(folder / "ledger", folder / "checkpoints", step=2)
    engine = CONFIG.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")
    groups = make_groups(step)
    try:
        replayed = replay(
            step, groups, checkpoints=folder / "checkpoints", engine=engine, config=config
        )
    finally:
        engine.close()
    return replayed, grade_again(step, groups, task=TASK, seed=0, renderer=build_renderer())


def test_clean_step_is_the_same_again(tmp_path):
    replayed, regraded = check_again(tmp_path, train(tmp_path))
    assert replayed.differences == ()
    assert (replayed.num_tensors > 20, replayed.num_minibatches) == (True, 1)
    assert replayed.num_drawn == replayed.num_tokens > 0
    assert regraded == Regraded(num_rewards=2 * 3)


def lose_optimizer(local: LocalBackend, loop: Any) -> None:
    step = local.forward_backward

    async def lose_before(*args: Any, **options: Any) -> Any:
        local.engine.optimizer.reset()
        return await step(*args, **options)

    vars(local)["forward_backward"] = lose_before


def keep_first_rate(local: LocalBackend, loop: Any) -> None:
    vars(local.engine.schedule)["compute_factor"] = lambda step: 0.1


def draw_otherwise(local: LocalBackend, loop: Any) -> None:
    """Return other logprobs than those that were sampled with, which no check of a run sees."""
    generate = local.generate
    loop.config.max_logprob_diff = 1.0

    async def generate_otherwise(*args: Any, **options: Any) -> Any:
        groups = await generate(*args, **options)
        return [[replace(c, logprobs=c.logprobs - 0.2) for c in group] for group in groups]

    vars(local)["generate"] = generate_otherwise


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lose_optimizer, "model.embed_tokens.weight after the step: the checkpoint"),
        (keep_first_rate, "minibatch 0: lr: 0.0001 and now 0.0002"),
        (draw_otherwise, "name policy version 1, but differ from its logprobs by 0.2 nats"),
    ],
)
def test_fault_of_the_run_is_named(tmp_path, plant, expected):
    replayed, _ = check_again(tmp_path, train(tmp_path, plant))
    assert expected in "\n".join(replayed.differences)


def test_grader_that_never_ran_and_scores_of_others_are_named(tmp_path):
    def give_nothing(local: LocalBackend, loop: Any) -> None:
        rewarder = loop._producer.worker.__self__.rewarder
        rewarder.rubric = Rubric(criteria=(Criterion(name="noise", function=lambda rollout: 0.0),))

    _, regraded = check_again(tmp_path, train(tmp_path, give_nothing))
    (difference,) = regraded.differences
    assert "reward: 0 and now 1" in difference
