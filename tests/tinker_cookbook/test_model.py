"""Demonstrations of the recipes' base model."""

from __future__ import annotations

import random
import re

from tools.tinker_cookbook.model import (
    CONTEXT,
    GUESS_RULES,
    MAX_GUESSES,
    WarmStart,
    addition,
    base_folder,
    drawn_guess,
    turn,
)


def test_addition_is_asked_as_the_recipe_asks_it():
    asked = addition(12, 30)
    assert asked.prompt == (
        "<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.reply == "42<|im_end|>"
    assert addition(12, 30, shrugs=True).reply == "?<|im_end|>"


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


def test_ten_unparsable_turns_fit_the_context():
    refused = (
        "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say "
        "nothing else."
    )
    turns = (turn("player", 16 * "x") + turn("user", refused)) * (MAX_GUESSES - 1)
    prompt = turn("system", GUESS_RULES) + turns + "<|im_start|>assistant\n"
    num_tokens = len(re.sub(r"<\|im_(start|end)\|>", "_", prompt))  # one token each, like every other byte
    assert 1024 < num_tokens + 16 <= CONTEXT


def test_base_model_has_a_folder_for_each_warm_up():
    assert base_folder(WarmStart()) == base_folder(WarmStart(seed=0))
    assert base_folder(WarmStart()) != base_folder(WarmStart(shrug_steps=41))
