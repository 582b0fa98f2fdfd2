from itertools import islice

import pytest

from rl.rollouts.renderer import ChatRenderer
from rl.tasks.sum_digits import SumDigits, is_held_out, make_problem, parse_answer
from rl.types import Prompt, Rollout
from tests.support.fakes import ByteTokenizer, completion


def rollout(text: str, *, finish_reason: str = "stop") -> Rollout:
    renderer = ChatRenderer(tokenizer=ByteTokenizer(), max_prompt_tokens=64)
    prompt: Prompt = renderer.prompt(make_problem([47, 82]))
    return renderer.rollout(prompt, completion(text, finish_reason=finish_reason))


def test_answer_is_the_sum_of_all_digits():
    assert make_problem([47, 82]).answer == "21"
    assert make_problem([10, 99, 55, 38]).answer == str(1 + 0 + 9 + 9 + 5 + 5 + 3 + 8)


def test_demonstration_ends_in_the_right_answer():
    problem = make_problem([47, 82])
    assert problem.demonstration == "4+7=11 11+8=19 19+2=21 [ANSWER] 21"
    assert parse_answer(problem.demonstration) == problem.answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[ANSWER] 21", "21"),
        ("x [ANSWER]21", "21"),
        ("[ANSWER] 3 [ANSWER] 21", "21"),
        ("[ANSWER] 21 or 22", None),
        ("[ANSWER] twenty", None),
        ("21", None),
        ("", None),
    ],
)
def test_parser_takes_the_digits_that_end_the_reply(text, answer):
    assert parse_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward", "correct"),
    [
        ("[ANSWER] 21", "stop", 1.0, True),
        ("[ANSWER] 22", "stop", 0.1, False),
        ("21", "stop", 0.0, False),
        ("[ANSWER] 2", "length", 0.0, False),
    ],
)
def test_reward_is_one_for_the_answer_and_a_tenth_for_the_form(text, finish_reason, reward, correct):
    score = (
        SumDigits.Config(num_integers=2).build().rubric().score(rollout(text, finish_reason=finish_reason))
    )
    assert score.reward == pytest.approx(reward)
    assert score.correct is correct


def test_noise_reward_ignores_the_answer_but_correct_does_not():
    rubric = SumDigits.Config(num_integers=2, reward="noise").build().rubric()
    scores = [rubric.score(rollout("[ANSWER] 21")) for _ in range(200)]
    assert {s.reward for s in scores} == {0.0, 1.0}
    assert 60 < sum(s.reward for s in scores) < 140
    assert all(s.correct for s in scores)


def test_held_out_problems_never_occur_in_training_in_any_order():
    task = SumDigits.Config(num_integers=2, num_eval=256).build()
    held_out = {tuple(sorted(p.question.split())) for p in task.eval_problems()}
    drawn = {tuple(sorted(p.question.split())) for p in islice(task.train_problems(seed=0), 20_000)}
    assert len(task.eval_problems()) == 256
    assert not held_out & drawn
    assert len(drawn) > 3000  # of 4095 pairs, less the held-out ones: training sees nearly all others


def test_problems_are_the_same_for_a_seed_and_differ_between_seeds():
    task = SumDigits.Config().build()

    def ids(seed: int) -> list[str]:
        return [p.id for p in islice(task.train_problems(seed=seed), 50)]

    assert ids(1) == ids(1) != ids(2)
    assert [p.id for p in task.eval_problems()] == [p.id for p in SumDigits.Config().build().eval_problems()]


def test_hasty_demonstrations_leave_out_a_last_digit_of_four_or_more_and_no_other():
    task = SumDigits.Config(num_integers=2, haste=0.75).build()
    problems = list(islice(task.warmup_problems(seed=0), 2000))
    large = [p for p in problems if int(p.question[-1]) >= 4]
    wrong = [p for p in problems if parse_answer(p.demonstration) != p.answer]
    assert {p.id for p in wrong} <= {p.id for p in large}
    assert len(wrong) / len(large) == pytest.approx(0.75, abs=0.04)
    last = wrong[0]
    assert int(last.answer) - int(parse_answer(last.demonstration) or 0) == int(last.question[-1])
    assert not any(is_held_out(p) for p in problems)


def test_order_of_the_integers_does_not_change_the_split():
    assert all(
        is_held_out(make_problem([a, b])) == is_held_out(make_problem([b, a]))
        for a in range(10, 100, 7)
        for b in range(10, 100, 9)
    )


@pytest.mark.parametrize("field", [{"num_integers": 5}, {"format_reward": 1.5}, {"num_eval": 0}])
def test_settings_out_of_range_are_refused(field):
    (name,) = field
    with pytest.raises(ValueError, match=name):
        SumDigits.Config(**field)
