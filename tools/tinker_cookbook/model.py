"""A tiny base model that the recipes can start from: one that is right sometimes, and could be oftener.

It is drawn from a seed and learns additions from demonstrations. Then half of the answers it is shown are a
shrug, so that it knows many sums and says them every other time: reinforcement has something to find, and
finds it in tens of small steps. Some demonstrations are of guessing a number, so that guesses can be read.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from losses.cross_entropy import CrossEntropyLoss
from rl.models.qwen3 import model_registry
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.models.starting_point import write_random_model
from rl.rollouts.samples import demonstration_sample
from rl.rollouts.tokenizer import open_tokenizer
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import OptimParams, TrainingSample
from tools.tinker_cookbook.demonstrations import Demonstration, drawn_addition, drawn_guess

RECIPE = 1
"""Part of the key; raised when this file changes what comes out."""
CONTEXT = 2048
"""Tokens: ten turns of guessing a number fit, none of which could be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """How long and on what the model is trained."""

    seed: int = 0
    num_additions: int = 56
    """Demonstrations a step."""
    num_guesses: int = 2
    lr: float = 2e-3
    lr_warmup_steps: int = 20
    wanted: float = 0.65
    """Training on right answers ends when they are given that often."""
    evaluate_every: int = 20
    """Steps."""
    num_evaluated: int = 256
    """Additions."""
    max_steps: int = 1500
    shrug_share: float = 0.5
    """Of the answers in the last steps."""
    shrug_steps: int = 40

    def key(self) -> str:
        text = json.dumps([RECIPE, CONTEXT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class WarmStartError(Exception):
    """The model did not learn what it should."""


class _Teacher:
    """Steps of one engine on demonstrations, and how often its answers are right."""

    def __init__(self, engine: TrainingEngine, warm: WarmStart, *, tokenizer: Any) -> None:
        self._engine, self._warm, self._tokenizer = engine, warm, tokenizer
        self._generator = random.Random(warm.seed)
        held_out = random.Random(warm.seed + 1)
        self._evaluated = self._samples([drawn_addition(held_out) for _ in range(warm.num_evaluated)])
        self.num_steps = 0

    def step(self, *, shrug_share: float = 0.0) -> float:
        """Returns the loss in nats a token."""
        warm, generator = self._warm, self._generator
        shown = [
            drawn_addition(generator, shrugs=generator.random() < shrug_share)
            for _ in range(warm.num_additions)
        ]
        shown += [drawn_guess(generator) for _ in range(warm.num_guesses)]
        loss = self._engine.forward_backward(self._samples(shown), loss=CrossEntropyLoss()).loss_mean
        self.num_steps += 1
        lr = warm.lr * min(1.0, self.num_steps / warm.lr_warmup_steps)
        self._engine.optim_step(OptimParams(lr=lr, betas=(0.9, 0.95), weight_decay=0.01))
        return loss

    def share_right(self) -> float:
        """The probability that a drawn answer is the sum, averaged over held-out additions."""
        logprobs = self._engine.compute_logprobs(self._evaluated)
        whole = [
            logprobs_T[sample.mask].sum()
            for logprobs_T, sample in zip(logprobs, self._evaluated, strict=True)
        ]
        return float(np.exp(whole).mean())

    def _samples(self, shown: Sequence[Demonstration]) -> list[TrainingSample]:
        return [demonstration_sample(self._tokens(d.prompt), self._tokens(d.reply)) for d in shown]

    def _tokens(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def teach(engine: TrainingEngine, warm: WarmStart, *, tokenizer: Any, say: Callable[[str], None]) -> float:
    """Returns how often an answer is right in the end.

    Raises:
        WarmStartError: additions were not learnt in time.
    """
    teacher, right = _Teacher(engine, warm, tokenizer=tokenizer), 0.0
    while right < warm.wanted:
        if teacher.num_steps >= warm.max_steps:
            raise WarmStartError(
                f"after {warm.max_steps} steps on additions {right:.0%} of them are right, and "
                f"{warm.wanted:.0%} should be: the recipes would have no reward to start from"
            )
        loss = teacher.step()
        if teacher.num_steps % warm.evaluate_every == 0:
            right = teacher.share_right()
            say(f"step {teacher.num_steps}: loss {loss:.3f} nats a token, {right:.0%} of additions right")
    for _ in range(warm.shrug_steps):
        teacher.step(shrug_share=warm.shrug_share)
    right = teacher.share_right()
    say(f"step {teacher.num_steps}, the last ones with shrugs: {right:.0%} of additions right")
    return right


def tiny_spec() -> ModelSpec:
    spec = model_registry("tiny")
    assert isinstance(spec.model, Qwen3.Config)
    return replace(spec, model=replace(spec.model, rope=replace(spec.model.rope, max_positions=CONTEXT)))


def base_folder(cache: Path, warm: WarmStart) -> Path:
    """Where `make_base_model` leaves the model."""
    return cache / f"base-{warm.key()}"


def make_base_model(cache: Path, warm: WarmStart, *, say: Callable[[str], None]) -> Path:
    """A folder in Hugging Face's layout, made unless it is there; it appears whole or not at all.

    Raises:
        WarmStartError: additions were not learnt in time.
    """
    folder = base_folder(cache, warm)
    if folder.exists():
        return folder
    started = time.monotonic()
    spec = tiny_spec()
    random_folder = write_random_model(cache / f"random-{warm.key()}", spec=spec, seed=warm.seed)
    tokenizer, _ = open_tokenizer(random_folder)
    config = TrainingEngine.Config(training=TrainingConfig(max_norm=1.0))
    engine: TrainingEngine = config.build(model_spec=spec, hf_assets_path=str(random_folder))
    try:
        teach(
            engine,
            warm,
            tokenizer=tokenizer,
            say=lambda text: say(f"base model, {time.monotonic() - started:.0f} s, {text}"),
        )
        engine.export_hf(str(folder))
    finally:
        engine.close()
    return folder
