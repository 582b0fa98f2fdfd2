"""Reward functions of a user's own, in both forms."""

import asyncio
from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest

from rl.rollouts.reward_functions import MESSAGES, find_place, make_criterion
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric, RubricCall
from rl.types import Completion, Problem, Prompt, Rollout, Turn
from rl.utils.namespaces import NETWORK


def make_rollout(text, *, info=None, sample=0):
    problem = Problem(id="1", question="3 + 4", answer="7", info=info or {"answer": 7, "level": 2})
    prompt = Prompt(problem=problem, token_ids=np.zeros(3, dtype=np.int32))
    completion = Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        policy_versions=np.zeros(2, dtype=np.int32),
        finish_reason="stop",
    )
    turn = Turn(messages=(), prompt_ids=prompt.token_ids, completion=completion, text=text)
    return Rollout(prompt=prompt, sample=sample, turns=(turn,))


def of_rollout(rollout):
    return float(rollout.text == rollout.answer) + rollout.info["level"]


def of_completions(completions, answer, level):
    return [float(int(c) == a) + n for c, a, n in zip(completions, answer, level, strict=True)]


def with_everything(prompts, completions, completion_ids, **columns):
    assert prompts == ["3 + 4", "3 + 4"]
    assert completion_ids == [[5, 6], [5, 6]]
    assert columns == {"answer": [7, 7], "level": [2, 2]}
    return [None, 1.0]


async def in_a_while(completions, **columns):
    await asyncio.sleep(0)
    return [1.0 for _ in completions]


def of_messages(completions, prompts):
    assert prompts[0] == [{"role": "user", "content": "3 + 4"}]
    return [float(completion[0]["content"] == "7") for completion in completions]


def wrong_form(rollout, answer):
    return 1.0


def other_column(completions, gold):
    return [1.0]


def score(function, rollouts, tmp_path, **changes):
    place = find_place(function, folder=tmp_path)
    criterion = make_criterion(place, weight=1.0, **changes)
    rubric = Rubric(criteria=(criterion,))
    calls = rubric.list_calls(rollouts)
    slots = rubric.make_slots(4)
    results = [asyncio.run(rubric.compute_result(call, slots=slots)) for call in calls]
    return criterion, rubric.combine_scores(rollouts, calls, results)


def test_function_of_a_rollout_reads_answer_and_columns(tmp_path):
    criterion, scores = score(of_rollout, [make_rollout("7"), make_rollout("8")], tmp_path)
    assert isinstance(criterion, Criterion)
    assert [s.reward for s in scores] == [3.0, 2.0]


def test_function_in_trl_form_gets_lists_of_columns(tmp_path):
    criterion, scores = score(of_completions, [make_rollout("7"), make_rollout("8")], tmp_path)
    assert isinstance(criterion, GroupCriterion)
    assert not criterion.needs_group
    assert [s.reward for s in scores] == [3.0, 2.0]


def test_keywords_get_everything_and_none_counts_as_0(tmp_path):
    _, scores = score(with_everything, [make_rollout("7"), make_rollout("8")], tmp_path)
    assert [s.reward for s in scores] == [0.0, 1.0]


def test_async_function_in_trl_form(tmp_path):
    _, scores = score(in_a_while, [make_rollout("7")], tmp_path)
    assert [s.reward for s in scores] == [1.0]


def test_question_of_messages_gives_messages(tmp_path):
    info = {MESSAGES: [{"role": "user", "content": "3 + 4"}]}
    _, scores = score(of_messages, [make_rollout("7", info=info)], tmp_path)
    assert [s.reward for s in scores] == [1.0]


def test_other_form_is_refused_with_both_forms(tmp_path):
    with pytest.raises(ValueError, match=r"takes \(rollout, answer\): must be f\(rollout\)"):
        score(wrong_form, [make_rollout("7")], tmp_path)


def test_argument_that_is_no_column_is_refused_with_the_columns(tmp_path):
    with pytest.raises(ValueError, match=r"asks for 'gold', .* its columns are 'answer', 'level'"):
        score(other_column, [make_rollout("7")], tmp_path, columns={"answer": 7, "level": 2})


def test_failing_function_is_a_failed_score_with_its_name(tmp_path):
    def broken(rollout):
        return 1 / 0

    _, (result,) = score(broken, [make_rollout("7")], tmp_path)
    assert result.failure.startswith("reward 'broken' raised ZeroDivisionError('division by zero')")


def test_saved_function_is_named_by_its_content(tmp_path):
    first = find_place(lambda rollout: 1.0, folder=tmp_path)
    second = find_place(lambda rollout: 2.0, folder=tmp_path)
    assert first != second
    assert len(list(tmp_path.iterdir())) == 2
    assert replace(make_criterion(first, weight=1.0), weight=2.0).name == "reward"


def test_reward_without_a_network_is_told_how_to_get_one(monkeypatch):
    def ask(rollout):
        raise URLError(ConnectionRefusedError(111, "Connection refused"))

    rubric = Rubric(criteria=(Criterion(name="ask", function=ask),))
    call = RubricCall(names=("ask",), is_async=False, places=(0,), rollouts=(make_rollout("a"),))
    assert "needs_network" not in str(rubric.call_sync(call).failure)
    monkeypatch.setenv(NETWORK, "net:[1]")
    failure = str(rubric.call_sync(call).failure)
    assert "a function that needs one says so with `needs_network = True`" in failure
