"""The answer of a reply with thoughts."""

import pytest

from rl.rollouts.replies import answer_part


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12\n", "12"),
        ("<think>\nis it 11?\n</think>\n\n12", "12"),
        ("it was opened in the prompt</think>12", "12"),
        ("<think>a</think>11<think>b</think> 12 ", "12"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think>cut off in a thought: 12", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_thought(text, answer):
    assert answer_part(text) == answer
