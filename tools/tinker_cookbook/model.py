"""The tiny base model of the recipes: it is right sometimes and could be right more often.

A model drawn from a seed learns additions from demonstrations. Then half of the demonstrated
answers are a shrug, so that it knows many sums and says them every other time: reinforcement finds
something to improve in tens of small steps. Some demonstrations guess a number, so that guesses can
be parsed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from losses.cross_entropy import CrossEntropyLoss
from rl.models.files.hf import write_random_model
from rl.models.files.tokenizer import open_tokenizer
from rl.models.qwen3 import model_registry
from rl.rollouts.samples import make_demonstration_sample
from rl.trainer_types import OptimParams
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample

VERSION = 1
"""Part of the folder's name, raised when this file changes the result."""
CONTEXT = 2048
"""Tokens of the context: ten turns of guessing fit, even if no guess can be parsed."""
SEED = 0
NUM_ADDITIONS, NUM_GUESSES = 56, 2
"""Demonstrations of each step."""
LR, LR_WARMUP_STEPS = 2e-3, 20
WANTED_SHARE = 0.65
"""Share of right answers at which training on right answers ends."""
EVALUATE_EVERY, NUM_EVALUATED = 20, 256
"""Steps between evaluations, and their held-out additions."""
MAX_STEPS = 1500
SHRUG_SHARE, SHRUG_STEPS = 0.5, 40
"""Share of shrugs among the answers of the last steps, and the number of these steps."""


class Teacher:
    """Training of one engine on demonstrations."""

    def __init__(self, engine: TrainingEngine, *, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._generator, held_out = random.Random(SEED), random.Random(SEED + 1)
        self._evaluated = self._samples([drawn_addition(held_out) for _ in range(NUM_EVALUATED)])
        self.num_steps = 0

    def teach(self) -> None:
        """Train until the engine knows most additions and says half of them."""
        right = 0.0
        while right < WANTED_SHARE:
            if self.num_steps >= MAX_STEPS:
                raise ValueError(
                    f"after {MAX_STEPS} steps on additions {right:.0%} of them are right, and "
                    f"{WANTED_SHARE:.0%} should be: the recipes would have no reward to start from"
                )
            loss = self.step()
            if self.num_steps % EVALUATE_EVERY == 0:
                right = self.share_right()
                print(
                    f"step {self.num_steps}: loss {loss:.3f}, {right:.0%} of additions right",
                    flush=True,
                )
        for _ in range(SHRUG_STEPS):
            self.step(shrug_share=SHRUG_SHARE)
        print(
            f"after {SHRUG_STEPS} steps with shrugs: {self.share_right():.0%} of additions right",
            flush=True,
        )

    def step(self, *, shrug_share: float = 0.0) -> float:
        """Make a step and return the loss in nats per token."""
        generator = self._generator
        shown = [
            drawn_addition(generator, shrugs=generator.random() < shrug_share)
            for _ in range(NUM_ADDITIONS)
        ]
        shown += [drawn_guess(generator) for _ in range(NUM_GUESSES)]
        loss = self._engine.forward_backward(
            self._samples(shown), loss=CrossEntropyLoss()
        ).loss_mean
        self.num_steps += 1
        lr = LR * min(1.0, self.num_steps / LR_WARMUP_STEPS)
        self._engine.optim_step(OptimParams(lr=lr, betas=(0.9, 0.95), weight_decay=0.01))
        return loss

    def share_right(self) -> float:
        """Return the mean probability of the right answer over held-out additions."""
        logprobs = self._engine.compute_logprobs(self._evaluated)
        whole = [
            of_one[sample.mask].sum()
            for of_one, sample in zip(logprobs, self._evaluated, strict=True)
        ]
        return float(np.exp(whole).mean())

    def _samples(self, shown: Sequence[Demonstration]) -> list[TrainingSample]:
        return [
            make_demonstration_sample(self._tokens(d.prompt), self._tokens(d.reply)) for d in shown
        ]

    def _tokens(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def make_base_model(cache: Path) -> Path:
    """Return a Hugging Face folder of the warmed-up model, which is made unless it exists."""
    folder = cache / f"base-{VERSION}"
    if folder.exists():
        return folder
    spec = model_registry("tiny")
    spec = replace(
        spec, model=replace(spec.model, rope=replace(spec.model.rope, max_positions=CONTEXT))
    )
    random_folder = write_random_model(cache / f"random-{VERSION}", spec=spec, seed=SEED)
    tokenizer, _ = open_tokenizer(random_folder)
    config = TrainingEngine.Config(training=TrainingConfig(max_norm=1.0))
    engine: TrainingEngine = config.build(model_spec=spec, hf_assets_path=str(random_folder))
    try:
        Teacher(engine, tokenizer=tokenizer).teach()
        engine.export_hf(str(folder))
    finally:
        engine.close()
    return folder


# Demonstrations: the recipes' conversations as `qwen3_instruct` renders them

HIGHEST_TERM = 100
"""Largest term of `math_rl`'s additions."""
HIGHEST_NUMBER, MAX_GUESSES = 1024, 10
"""Bounds of `guess_number`; its numbers are below the first."""
GUESS_RULES = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
    "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you "
    "whether you guess is too high, too low, or correct."
)
"""Prompt of the recipe, letter by letter."""
SHRUG = "?"
"""Reply that is never right."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    prompt: str
    reply: str


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def asking(told: str, *, reply: str) -> Demonstration:
    return Demonstration(f"{told}<|im_start|>assistant\n", f"{reply}<|im_end|>")


def drawn_addition(generator: random.Random, *, shrugs: bool = False) -> Demonstration:
    """Return an addition as the recipe asks it, after its one example."""
    x, y = generator.randint(0, HIGHEST_TERM), generator.randint(0, HIGHEST_TERM)
    told = (
        turn("user", "What is 4 + 5?")
        + turn("assistant", "9")
        + turn("user", f"What is {x} + {y}?")
    )
    return asking(told, reply=SHRUG if shrugs else str(x + y))


def drawn_guess(generator: random.Random) -> Demonstration:
    """Return a turn of a game after some others, with guesses that the answers before them
    allow.
    """
    number, (low, high) = generator.randrange(HIGHEST_NUMBER), (0, HIGHEST_NUMBER - 1)
    told = turn("system", GUESS_RULES)
    for _ in range(generator.randrange(MAX_GUESSES)):
        tried = generator.randint(low, high)
        if tried == number:
            break
        told += turn("player", f"Guess: {tried}") + turn(
            "user", "Too low" if tried < number else "Too high"
        )
        low, high = (tried + 1, high) if tried < number else (low, tried - 1)
    return asking(told, reply=f"Guess: {generator.randint(low, high)}")
