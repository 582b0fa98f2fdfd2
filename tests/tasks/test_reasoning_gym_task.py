import dataclasses
import pickle
import re
from itertools import islice

import pytest

from rl.rollouts.producer import NumberedProblems
from rl.tasks.reasoning_gym_task import ReasoningGym
from rl.types import LoopPosition
from tests.support.scored import reply


def build(dataset="basic_arithmetic", **options):
    return ReasoningGym.Config(dataset=dataset, **{"num_eval": 16, **options}).build()


def test_problem_is_available_by_its_number():
    problems = build().train_problems(seed=0)
    in_order = list(islice(problems, 12))
    assert [problems.problem(n) for n in reversed(range(12))] == in_order[::-1]
    again = NumberedProblems(
        build().train_problems(seed=0), LoopPosition(step=1, num_problems=5_000_000)
    )
    assert next(again)[1] == problems.problem(5_000_000)


def test_held_out_problems_are_different_and_never_trained_on():
    task = build("coin_flip", num_eval=40)
    held_out = task.eval_sets()["held_out"]
    questions = {p.question for p in held_out}
    assert len(questions) == 40
    assert [p.id for p in build("coin_flip", num_eval=40).eval_sets()["held_out"]] == [
        p.id for p in held_out
    ]
    # A small dataset, of which these draws would meet many held-out ones.
    assert not questions & {p.question for p in islice(task.train_problems(seed=0), 400)}


def test_dataset_that_is_all_held_out_has_nothing_to_train_on():
    settings = {"min_value": 2, "max_value": 3, "max_numbers": 2}
    with pytest.raises(ValueError, match="num_eval=10 must be fewer") as caught:
        build("lcm", settings=settings, num_eval=10)
    num_there = int(str(caught.value).partition("gave ")[2].partition(" ")[0])
    task = build("lcm", settings=settings, num_eval=num_there)
    with pytest.raises(ValueError, match=r"training problem 0 .* is held out in all 64 draws"):
        next(task.train_problems(seed=0))


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "countdown", "gsm_symbolic", "sokoban"])
def test_right_answer_has_the_full_score_after_pickling(dataset):
    task = build(dataset, num_eval=2)
    rubric = pickle.loads(pickle.dumps(task.rubric(seed=0)))
    for problem in task.eval_sets()["held_out"]:
        right = reply(pickle.loads(pickle.dumps(problem)), f"so <answer>{problem.answer}</answer>")
        score = rubric.score(right)
        assert (score.reward, score.correct, score.failure) == (1.0, True, None)


def test_solved_at_lets_partly_right_answers_count():
    problem = build().eval_sets()["held_out"][0]
    half = reply(problem, f"<answer>{problem.answer} or so</answer>")
    strict, lenient = (build(solved_at=bar).rubric(seed=0).score(half) for bar in (1.0, 0.1))
    assert 0.1 < strict.reward == lenient.reward < 1.0
    assert (strict.correct, lenient.correct) == (False, True)
    task = build("countdown", num_eval=2)
    wrong = reply(task.eval_sets()["held_out"][0], "<answer>1 + 1</answer>")
    assert task.rubric(seed=0).score(wrong).reward == 0.05  # the dataset's own score


def test_settings_reach_the_dataset_and_composite_has_parts():
    parts = '[{"name": "gcd"}, {"name": "lcm", "weight": 2}]'
    task = build("composite", settings={"datasets": parts})
    names = {p.info["entry"]["metadata"]["source_dataset"] for p in task.eval_sets()["held_out"]}
    assert names == {"gcd", "lcm"}
    problem = next(
        build("chain_sum", settings={"min_terms": 5, "max_terms": 5}).train_problems(seed=0)
    )
    assert sum(problem.question.count(sign) for sign in (" + ", " - ")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": "basic_arithmetik"},
            "no dataset of this name; did you mean basic_arithmetic or ",
        ),
        ({"settings": {"terms": 2}}, "'basic_arithmetic' has no terms; it has allow_negation, "),
        ({"settings": {"min_terms": 9, "max_terms": 2}}, "refuses: max_terms must be >= min_terms"),
        (
            {"settings": {"operators": '["+"'}},
            "settings.operators='[\"+\"': starts like JSON, but is not",
        ),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        build(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("place", ["tags", "last_line", "last_number", "whole"])
def test_demonstrations_are_right_replies_to_problems_that_are_not_held_out(place):
    task = build("gcd", answer_in=place)
    held = {p.question for p in task.eval_sets()["held_out"]}
    shown = list(islice(task.warmup_problems(seed=0), 8))
    assert [task.rubric(seed=0).score(reply(p, p.demonstration)).reward for p in shown] == [1.0] * 8
    assert not held & {p.question for p in shown}
    assert [p.id for p in shown] != [p.id for p in islice(task.train_problems(seed=0), 8)]


def test_numbers_of_held_out_problems_are_never_trained_on_in_their_order():
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    numbers = lambda problems: {tuple(re.findall(r"\d+", p.question)) for p in problems}  # noqa: E731
    trained = {}
    for split_by in ("question", "numbers"):
        task = build("chain_sum", settings=settings, num_eval=40, split_by=split_by)
        trained[split_by] = numbers(islice(task.train_problems(seed=0), 300))
        held_out = numbers(task.eval_sets()["held_out"])
    assert trained["question"] & held_out
    assert not trained["numbers"] & held_out
    assert len(trained["numbers"]) > 50


def test_last_number_counts_by_its_value():
    task = build("chain_sum", num_eval=1, answer_in="last_number")
    (problem,) = task.eval_sets()["held_out"]
    entry = {**problem.info["entry"], "answer": "-1,000"}
    problem = dataclasses.replace(problem, info={"entry": entry})
    texts = ("It is \u22121000.0.", "\u22121,000 it is", "It is 1,000.", "It is 000.")
    rewards = [task.rubric(seed=0).score(reply(problem, text)).reward for text in texts]
    assert rewards[:2] == [1.0, 1.0]
    assert max(rewards[2:]) < 1.0
    cut_off = task.rubric(seed=0).score(reply(problem, "It is -1,000", finish_reason="length"))
    assert (cut_off.reward, cut_off.unparsed) == (0.0, ("answer",))


def test_noise_is_a_coin_and_correctness_stays_the_dataset_s():
    task = build("chain_sum", num_eval=64, answer_in="last_number", reward="noise")
    rubric = task.rubric(seed=0)
    scores = [rubric.score(reply(p, f"It is {p.answer}.")) for p in task.eval_sets()["held_out"]]
    assert all(score.correct for score in scores)
    assert 20 < sum(score.reward for score in scores) < 44


def test_warm_up_needs_unique_answers():
    with pytest.raises(ValueError, match="'graph_color' has no answers to warm up on"):
        next(build("graph_color", num_eval=1).warmup_problems(seed=0))
