from itertools import islice

import pytest

from rl.tasks.reverse_text import ReverseText
from rl.types import Problem
from tests.support.tasks import demonstrated_scores, scored

ABCD = Problem(id="reverse-text/abcd", question="abcd", answer="dcba")


def test_problem_asks_for_a_reversed_word():
    problems = list(islice(ReverseText.Config(num_letters=(4, 6)).build().train_problems(seed=0), 300))
    assert {len(p.question) for p in problems} == {4, 5, 6}
    for problem in problems:
        assert problem.question.islower()
        assert problem.answer == problem.demonstration == problem.question[::-1]
        assert problem.id == f"reverse-text/{problem.question}"


@pytest.mark.parametrize(
    ("text", "similarity", "correct"),
    [
        (" dcba\n", 1.0, True),
        ("<think>d, c, b, a</think>\ndcba", 1.0, True),
        ("<think>dcba", 0.0, False),
        ("dcb", 6 / 7, False),  # twice the 3 letters in common over the 7 of both
        ("abcd", 2 / 8, False),  # the longest block in common is a letter
        ("dcbaa", 8 / 9, False),
        ("DCBA", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_share_of_the_reward_is_for_similarity(text, similarity, correct):
    score = scored(ReverseText.Config(similarity_reward=0.2).build(), ABCD, text)
    assert score.reward == pytest.approx(0.8 * correct + 0.2 * similarity)
    assert score.correct is correct


def test_hasty_demonstrations_omit_the_last_letter():
    scores = demonstrated_scores(ReverseText.Config(haste=0.75).build(), 2000)
    early = [(p, s) for p, s in scores if p.question < "n"]
    assert {s.reward for p, s in scores if p.question >= "n"} == {1.0}
    hasty = [(p, s) for p, s in early if not s.correct]
    assert len(hasty) / len(early) == pytest.approx(0.75, abs=0.04)
    assert {p.demonstration for p, _ in hasty} == {p.answer[:-1] for p, _ in hasty}
    assert all(s.reward < 0.2 for _, s in hasty)
