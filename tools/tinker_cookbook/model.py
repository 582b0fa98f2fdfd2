"""The tiny base model of the recipes: it is right sometimes and could be right more often.

A model drawn from a seed learns additions from demonstrations. Then half of the demonstrated answers are a shrug, so
that it knows many sums and says them every other time: reinforcement finds something to improve in tens of small
steps. Some demonstrations guess a number, so that guesses can be parsed.
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
from rl.models.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.models.spec import ModelSpec
from rl.models.tokenizer import open_tokenizer
from rl.rollouts.samples import demonstration_sample
from rl.tinker.base import Base
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.serving import TinkerServer
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import OptimParams, TrainingSample

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "tinker_cookbook"
RECIPE = 1
"""Part of the key, raised when this file changes the result."""
CONTEXT = 2048
"""Tokens of the context: ten turns of guessing fit, even if no guess can be parsed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Settings of the warm-up."""

    seed: int = 0
    num_additions: int = 56
    """Additions per step."""
    num_guesses: int = 2
    lr: float = 2e-3
    lr_warmup_steps: int = 20
    wanted: float = 0.65
    """Share of right answers at which training on right answers ends."""
    evaluate_every: int = 20
    """Steps between evaluations."""
    num_evaluated: int = 256
    """Held-out additions."""
    max_steps: int = 1500
    shrug_share: float = 0.5
    """Share of shrugs among the answers of the last steps."""
    shrug_steps: int = 40

    def key(self) -> str:
        text = json.dumps([RECIPE, CONTEXT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class WarmStartError(Exception):
    """The warm-up did not reach its goal."""


class _Teacher:
    """Training of one engine on demonstrations."""

    def __init__(self, engine: TrainingEngine, warm: WarmStart, *, tokenizer: Any) -> None:
        self._engine, self._warm, self._tokenizer = engine, warm, tokenizer
        self._generator = random.Random(warm.seed)
        held_out = random.Random(warm.seed + 1)
        self._evaluated = self._samples([drawn_addition(held_out) for _ in range(warm.num_evaluated)])
        self.num_steps = 0

    def step(self, *, shrug_share: float = 0.0) -> float:
        """Make a step and return the loss in nats per token."""
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
        """Return the mean probability of the right answer over held-out additions."""
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


def teach(engine: TrainingEngine, warm: WarmStart, *, tokenizer: Any, log: Callable[[str], None]) -> float:
    """Train the engine and return the share of right answers.

    Raises:
        WarmStartError: the additions were not learned in time.
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
            log(f"step {teacher.num_steps}: loss {loss:.3f} nats a token, {right:.0%} of additions right")
    for _ in range(warm.shrug_steps):
        teacher.step(shrug_share=warm.shrug_share)
    right = teacher.share_right()
    log(f"step {teacher.num_steps}, the last ones with shrugs: {right:.0%} of additions right")
    return right


def tiny_spec() -> ModelSpec:
    spec = model_registry("tiny")
    return replace(spec, model=replace(spec.model, rope=replace(spec.model.rope, max_positions=CONTEXT)))


def base_folder(warm: WarmStart, *, cache: Path = CACHE) -> Path:
    """Return the folder of `make_base_model`."""
    return cache / f"base-{warm.key()}"


def make_base_model(warm: WarmStart, *, cache: Path = CACHE, log: Callable[[str], None]) -> Path:
    """Return a Hugging Face folder of the warmed-up model, which is made unless it exists.

    Raises:
        WarmStartError: the additions were not learned in time.
    """
    folder = base_folder(warm, cache=cache)
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
            log=lambda text: log(f"base model, {time.monotonic() - started:.0f} s, {text}"),
        )
        engine.export_hf(str(folder))
    finally:
        engine.close()
    return folder


def cookbook() -> TinkerServer.Config:
    """Serve the warmed-up model under the name of its folder, from which the recipes open a tokenizer."""
    folder = str(base_folder(WarmStart()))
    return TinkerServer.Config(
        description="a tiny Qwen3 that adds numbers, for the cookbook's recipes",
        backend=LocalTinkerBackend.Config(base=Base.Config(name=folder, folder=folder)),
        port=0,
    )


# Demonstrations: the recipes' conversations as `qwen3_instruct` renders them

HIGHEST_TERM = 100
"""Largest term of `math_rl`'s additions."""
HIGHEST_NUMBER, MAX_GUESSES = 1024, 10
"""Bounds of `guess_number`; its numbers are below the first."""
GUESS_RULES = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
    "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you whether you "
    "guess is too high, too low, or correct."
)
"""Prompt of the recipe, letter by letter."""
SHRUG = "?"
"""Reply that is never right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    prompt: str
    reply: str


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def asking(told: str, *, reply: str) -> Demonstration:
    return Demonstration(prompt=f"{told}<|im_start|>assistant\n", reply=f"{reply}<|im_end|>")


def addition(x: int, y: int, *, shrugs: bool = False) -> Demonstration:
    """Return an addition as the recipe asks it, after its one example."""
    told = turn("user", "What is 4 + 5?") + turn("assistant", "9") + turn("user", f"What is {x} + {y}?")
    return asking(told, reply=SHRUG if shrugs else str(x + y))


def drawn_addition(generator: random.Random, *, shrugs: bool = False) -> Demonstration:
    return addition(generator.randint(0, HIGHEST_TERM), generator.randint(0, HIGHEST_TERM), shrugs=shrugs)


def drawn_guess(generator: random.Random) -> Demonstration:
    """Return a turn of a game after some others, with guesses that the answers before them allow."""
    number, (low, high) = generator.randrange(HIGHEST_NUMBER), (0, HIGHEST_NUMBER - 1)
    told = turn("system", GUESS_RULES)
    for _ in range(generator.randrange(MAX_GUESSES)):
        tried = generator.randint(low, high)
        if tried == number:
            break
        told += turn("player", f"Guess: {tried}") + turn("user", "Too low" if tried < number else "Too high")
        low, high = (tried + 1, high) if tried < number else (low, tried - 1)
    return asking(told, reply=f"Guess: {generator.randint(low, high)}")
