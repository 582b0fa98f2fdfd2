"""Demonstrations of the recipes' base model."""

from __future__ import annotations

import random
import re

from tools.tinker_cookbook.model import MAX_GUESSES, drawn_addition, drawn_guess


def test_addition_is_asked_as_the_recipe_asks_it():
    asked = drawn_addition(random.Random(0))
    found = re.fullmatch(
        r"<\|im_start\|>user\nWhat is 4 \+ 5\?<\|im_end\|>\n<\|im_start\|>assistant\n9<\|im_end\|>\n"
        r"<\|im_start\|>user\nWhat is (\d+) \+ (\d+)\?<\|im_end\|>\n<\|im_start\|>assistant\n",
        asked.prompt,
    )
    assert found is not None
    assert asked.reply == f"{int(found[1]) + int(found[2])}<|im_end|>"
    assert drawn_addition(random.Random(0), shrugs=True).reply == "?<|im_end|>"


def test_demonstrated_guess_is_consistent_with_the_answers_before_it():
    generator, lengths = random.Random(0), set()
    for _ in range(200):
        shown = drawn_guess(generator)
        told = re.findall(
            r"player\nGuess: (\d+)<\|im_end\|>\n<\|im_start\|>user\nToo (low|high)", shown.prompt
        )
        number = re.fullmatch(r"Guess: (\d+)<\|im_end\|>", shown.reply)
        assert number is not None
        guess = int(number[1])
        assert 0 <= guess < 1024
        assert all(guess > int(tried) if answer == "low" else guess < int(tried) for tried, answer in told)
        lengths.add(len(told))
    assert lengths == set(range(MAX_GUESSES))
