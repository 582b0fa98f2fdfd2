from itertools import islice

import pytest

from rl.tasks.sum_digits import SumDigits, make_problem, parse_answer
from tests.support.tasks import scored

PROBLEM = make_problem([47, 82])


def build(**settings):
    return SumDigits.Config(num_integers=2, **settings).build()


def test_demonstration_adds_up_all_digits():
    assert (PROBLEM.answer, PROBLEM.demonstration) == ("21", "4+7=11 11+8=19 19+2=21 [ANSWER] 21")
    assert make_problem([10, 99, 55, 38]).answer == str(1 + 0 + 9 + 9 + 5 + 5 + 3 + 8)


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("[ANSWER] 21", "stop", 1.0),
        ("x [ANSWER]21", "stop", 1.0),
        ("[ANSWER] 3 [ANSWER] 21", "stop", 1.0),
        ("<think>[ANSWER] 3</think>\n\n[ANSWER] 21\n", "stop", 1.0),
        ("[ANSWER] 21 or 22", "stop", 0.0),
        ("[ANSWER] twenty", "stop", 0.0),
        ("<think>[ANSWER] 21</think>", "stop", 0.0),
        ("[ANSWER] 22", "stop", 0.1),
        ("21", "stop", 0.0),
        ("[ANSWER] 2", "length", 0.0),
    ],
)
def test_reward_is_one_for_the_answer_and_a_tenth_for_the_form(text, finish_reason, reward):
    score = scored(build(), PROBLEM, text, finish_reason=finish_reason)
    assert score.reward == pytest.approx(reward)
    assert score.correct is (reward == 1.0)


def test_hasty_demonstrations_omit_a_last_digit_of_four_or_more():
    task = build(haste=0.75)
    problems = list(islice(task.warmup_problems(seed=0), 2000))
    large = [p for p in problems if int(p.question[-1]) >= 4]
    wrong = [p for p in problems if parse_answer(p.demonstration) != p.answer]
    assert {p.id for p in wrong} <= {p.id for p in large}
    assert len(wrong) / len(large) == pytest.approx(0.75, abs=0.04)
    last = wrong[0]
    assert int(last.answer) - int(parse_answer(last.demonstration) or 0) == int(last.question[-1])
    assert not any(task.is_held_out(p) for p in problems)
