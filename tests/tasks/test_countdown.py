import re
from fractions import Fraction
from itertools import islice

import pytest

from rl.tasks.countdown import Countdown, evaluate
from rl.types import Problem
from tests.support.tasks import scored

THIRTEEN = Problem(
    id="countdown/numbers-3-5-2-target-13",
    question="numbers 3 5 2 target 13",
    answer="3+5*2",
    demonstration="[ANSWER] 3+5*2",
    info={"numbers": [3, 5, 2], "target": 13},
)


def task(**settings):
    return Countdown.Config(**settings).build()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3+5*2", 13),
        ("(3+5)*2", 16),
        ("1/3+1/6", Fraction(1, 2)),
        ("3/(2-2)", None),
        ("3+", None),
        ("2**3", None),
        ("__import__('os')", None),
        ("(" * 5000 + "1" + ")" * 5000, None),
    ],
)
def test_expression_has_an_exact_value_or_none(text, value):
    assert evaluate(text) == value


def test_targets_use_all_numbers_and_allowed_operations():
    made = task(num_numbers=4, largest=20, max_target=50, operations="+-*/")
    used_signs = set()
    for problem in islice(made.train_problems(seed=0), 300):
        numbers, target = problem.info["numbers"], problem.info["target"]
        assert evaluate(problem.answer) == target
        assert sorted(map(int, re.findall(r"\d+", problem.answer))) == sorted(numbers)
        assert 1 <= target <= 50
        assert all(1 <= n <= 20 for n in numbers)
        assert problem.question.endswith(f"\nnumbers {' '.join(map(str, numbers))} target {target}")
        used_signs |= set(problem.answer) & set("+-*/")
    assert used_signs == set("+-*/")
    sums = islice(task(operations="+-").train_problems(seed=0), 200)
    assert not any(set(p.answer) & set("*/()") for p in sums)


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("so it is [ANSWER] (5 * 2) + 3 \n", 1.0, 1.0),
        ("<think>[ANSWER] 2</think>[ANSWER] 3+5*2", 1.0, 1.0),
        ("[ANSWER] 3+5+2", 0.0, 1.0),
        ("[ANSWER] 5*2", 0.0, 1.0),  # not all of the numbers have to be used
        ("[ANSWER] 5+5+3", 0.0, 0.0),
        ("[ANSWER] 13", 0.0, 0.0),
        ("[ANSWER] 3+*5", 0.0, 0.0),
    ],
)
def test_a_tenth_of_the_reward_is_for_the_form(text, answer, form):
    score = scored(task(), THIRTEEN, text)
    assert score.parts == {"answer": answer, "format": form}
    assert score.reward == pytest.approx(0.9 * answer + 0.1 * form)
    assert score.correct is (answer == 1.0)
    assert (score.failure, score.unparsed) == (None, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3+5*2",
        "[ANSWER]  ",
        "[ANSWER] thirteen",
        "[ANSWER] 3+5*2 = 13",
        "<think>perhaps [ANSWER] 3+5*2",
    ],
)
def test_reply_without_expression_is_unparsed(text):
    score = scored(task(), THIRTEEN, text)
    assert (score.reward, score.correct, score.failure) == (0.0, False, None)
    assert set(score.unparsed) >= {"answer", "format"}


def test_expression_of_a_cut_off_reply_is_unparsed():
    score = scored(task(), THIRTEEN, "[ANSWER] 3+5*2", finish_reason="length")
    assert (score.reward, score.correct, set(score.unparsed)) == (0.0, False, {"answer", "format"})


def test_settings_without_any_target_are_refused():
    with pytest.raises(
        ValueError, match=r"no target up to max_target=\d+ was found for operations='\+'"
    ):
        next(task(num_numbers=8, max_target=5, operations="+").train_problems(seed=0))
