"""What the tiny base model is shown: the recipes' conversations, as `qwen3_instruct` renders them."""

from __future__ import annotations

import random
from dataclasses import dataclass

HIGHEST_TERM = 100
"""Of `math_rl`'s additions."""
HIGHEST_NUMBER, MAX_GUESSES = 1024, 10
"""Of `guess_number`; its numbers end below the first."""
GUESS_RULES = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
    "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you whether you "
    "guess is too high, too low, or correct."
)
"""What the recipe tells the model, letter by letter."""
SHRUG = "?"
"""A reply that is never right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    prompt: str
    reply: str


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def asking(told: str, *, reply: str) -> Demonstration:
    return Demonstration(prompt=f"{told}<|im_start|>assistant\n", reply=f"{reply}<|im_end|>")


def addition(x: int, y: int, *, shrugs: bool = False) -> Demonstration:
    """As the recipe asks it, after its one example."""
    told = turn("user", "What is 4 + 5?") + turn("assistant", "9") + turn("user", f"What is {x} + {y}?")
    return asking(told, reply=SHRUG if shrugs else str(x + y))


def drawn_addition(generator: random.Random, *, shrugs: bool = False) -> Demonstration:
    return addition(generator.randint(0, HIGHEST_TERM), generator.randint(0, HIGHEST_TERM), shrugs=shrugs)


def drawn_guess(generator: random.Random) -> Demonstration:
    """One turn of a game, after some others; each guess is one that what was told before allows."""
    number, (low, high) = generator.randrange(HIGHEST_NUMBER), (0, HIGHEST_NUMBER - 1)
    told = turn("system", GUESS_RULES)
    for _ in range(generator.randrange(MAX_GUESSES)):
        tried = generator.randint(low, high)
        if tried == number:
            break
        told += turn("player", f"Guess: {tried}") + turn("user", "Too low" if tried < number else "Too high")
        low, high = (tried + 1, high) if tried < number else (low, tried - 1)
    return asking(told, reply=f"Guess: {generator.randint(low, high)}")
