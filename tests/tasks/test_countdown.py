import re
from fractions import Fraction
from itertools import islice

import pytest

from configs import countdown
from rl.tasks.countdown import Countdown, evaluate
from rl.types import Problem
from tests.support.tasks import demonstrated_scores, ids, played, scored

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
        ("2-5", -3),
        ("1/3+1/6", Fraction(1, 2)),
        ("10/4*2", 5),
        ("8/2/2", 2),
        ("7", 7),
        (" 3 + 5 ".strip(), 8),
        ("3/0", None),
        ("3/(2-2)", None),
        ("3+", None),
        ("", None),
        ("3 5", None),
        ("2**3", None),
        ("7//2", None),
        ("3(5)", None),
        ("-3+8", None),
        ("05+3", None),
        ("3.5*2", None),
        ("__import__('os')", None),
        ("9**9**9**9", None),
        ("(" * 99 + "1" + ")" * 99, 1),
        ("(" * 5000 + "1" + ")" * 5000, None),
        ("+".join(["1"] * 100), 100),
        ("1+" * 20_000 + "1", None),
    ],
)
def test_an_expression_has_an_exact_value_or_none(text, value):
    assert evaluate(text) == value


def test_targets_are_made_of_all_numbers_by_the_operations_allowed():
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


def test_only_the_operations_of_the_config_are_used():
    problems = islice(task(operations="+-").train_problems(seed=0), 200)
    assert not any(set(p.answer) & set("*/()") for p in problems)


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("[ANSWER] 3+5*2", 1.0, 1.0),
        ("so it is [ANSWER] (5 * 2) + 3 \n", 1.0, 1.0),
        ("[ANSWER] 1 [ANSWER] 2*5+3", 1.0, 1.0),
        ("[ANSWER] 3+5+2", 0.0, 1.0),
        # Not all of the numbers have to be used.
        ("[ANSWER] 5*2", 0.0, 1.0),
        # 5 twice, a number that is not given, one made by writing two side by side, no expression at all.
        ("[ANSWER] 5+5+3", 0.0, 0.0),
        ("[ANSWER] 13", 0.0, 0.0),
        ("[ANSWER] 35-22", 0.0, 0.0),
        ("[ANSWER] 3+*5", 0.0, 0.0),
        ("[ANSWER] 3/(5-5)", 0.0, 0.0),
    ],
)
def test_a_tenth_of_the_reward_is_for_using_the_numbers_as_one_may(text, answer, form):
    score = scored(task(), THIRTEEN, text)
    assert score.parts == {"answer": answer, "format": form}
    assert score.reward == pytest.approx(0.9 * answer + 0.1 * form)
    assert score.correct is (answer == 1.0)
    assert (score.failure, score.unparsed) == (None, ())


@pytest.mark.parametrize(
    "text",
    ["", "3+5*2", "[ANSWER]", "[ANSWER]  ", "[ANSWER] thirteen", "[ANSWER] 3+5*2 = 13", "[ANSWER] 3+5*2."],
)
def test_a_reply_without_an_expression_at_its_end_is_wrong_and_counted(text):
    score = scored(task(), THIRTEEN, text)
    assert (score.reward, score.correct, score.failure) == (0.0, False, None)
    assert set(score.unparsed) >= {"answer", "format"}


def test_noise_replaces_the_reward_and_needs_no_answer():
    right, none = (scored(task(reward="noise"), THIRTEEN, text) for text in ("[ANSWER] 3+5*2", "dunno"))
    assert set(right.parts) == set(none.parts) == {"noise"}
    assert (right.correct, none.correct) == (True, False)
    assert none.failure is None
    assert right.reward == none.reward


def test_demonstrations_earn_the_whole_reward():
    for made in (task(), countdown.tiny().task.build(), countdown.qwen3_0_6b().task.build()):
        assert {s.reward for _, s in demonstrated_scores(made, 100)} == {1.0}


def test_no_numbers_and_target_are_both_held_out_and_trained_on_in_any_order():
    made = task(num_numbers=2, largest=9, operations="+", num_eval=8)

    def key(problem):
        return (*sorted(problem.info["numbers"]), problem.info["target"])

    out = {key(p) for p in made.eval_sets()["held_out"]}
    trained = {key(p) for p in islice(made.train_problems(seed=0), 5000)}
    assert not out & trained
    # 45 pairs with one sum each.
    assert 30 < len(trained) < len(out | trained) <= 45


def test_problems_are_the_same_for_a_seed():
    assert ids(task(), seed=3) == ids(task(), seed=3)
    assert ids(task(), seed=3) != ids(task(), seed=4)


def test_the_instructions_example_is_right_and_has_the_form_that_is_asked_for():
    told = task().config.instruction
    numbers, target, shown = re.findall(r"numbers ([\d ]+) and the target (\d+): (.*)", told)[0]
    example = Problem(
        id="x",
        question="",
        answer="",
        info={"numbers": list(map(int, numbers.split())), "target": int(target)},
    )
    assert scored(task(), example, shown).reward == 1.0


def test_the_prompt_is_one_message():
    (turn,) = played(task(instruction=""), THIRTEEN, "x").turns
    assert [m.content for m in turn.messages] == ["numbers 3 5 2 target 13"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_numbers", 1),
        ("num_numbers", 9),
        ("largest", 1),
        ("max_target", 1),
        ("operations", ""),
        ("operations", "+%"),
        ("format_reward", 1.1),
        ("num_eval", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Countdown.Config(**{field: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"num_numbers": 8, "max_target": 5, "operations": "+"},
        {"num_numbers": 5, "largest": 3, "operations": "-"},
    ],
)
def test_settings_that_no_target_fits_end_with_an_error_that_names_them(settings):
    with pytest.raises(ValueError, match=r"operations=.*max_target=.*num_numbers=.*largest="):
        next(task(**settings).train_problems(seed=0))


def test_an_expression_in_a_thought_is_no_answer():
    assert scored(task(), THIRTEEN, "<think>[ANSWER] 2</think>[ANSWER] 3+5*2").correct
    cut_off = scored(task(), THIRTEEN, "<think>perhaps [ANSWER] 3+5*2")
    assert (cut_off.correct, cut_off.reward) == (False, 0.0)
