"""Checks of a task before a run starts: evaluation sets, prompts, environments, demonstrations, rubrics."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest

from actors.task_checks import check_demonstrations, check_task
from rl.config.tree import rebuild
from rl.loop.loop import Loop
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.types import Problem, Prompt, Reply, Rollout
from tests.support.conversations import Counting, TwinRenderer

RENDERER = TwinRenderer()
PROBLEM = Problem(id="ask/one", question="one", answer="1", demonstration=("first", "second"))
LONG = Problem(id="ask/long", question="a longer one", answer="1", demonstration=("first", "the second"))


def _length(rollout: Rollout) -> float:
    return float(len(rollout.text))


TWO_TURNS = partial(Counting, turns=1)
LENGTH = Rubric(criteria=(Criterion(name="length", function=_length),))


@dataclass(kw_only=True)
class Asking:
    """Task of two turns."""

    sets: Mapping[str, Sequence[Problem]] = field(default_factory=lambda: {"held_out": [PROBLEM]})
    training: Sequence[Problem] = (PROBLEM,)
    kind: Callable[..., Counting] = TWO_TURNS
    graded: Rubric = LENGTH
    made: list[Counting] = field(default_factory=list)

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        return cycle(self.training)

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        return cycle(self.training)

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return self.sets

    def environment(self, problem: Problem) -> Counting:
        self.made.append(self.kind(problem=problem))
        return self.made[-1]

    def rubric(self, *, seed: int) -> Rubric:
        return self.graded


def check(task: Asking, *, renderer: Renderer = RENDERER, room: int = 9, **edits: Any) -> Prompt:
    """Check a task with `room` tokens for prompts; `edits` are fields of the loop."""
    loop = rebuild(Loop.Config(), {path.replace("__", "."): value for path, value in edits.items()})
    return check_task(
        task,
        loop=loop,
        max_model_len=room + loop.sampling.max_tokens,
        time_limit_s=5.0,
        seed=0,
        environments=Environments(make=task.environment),
        renderer=renderer,
    )


def test_prompts_of_every_evaluation_set_and_of_training_must_fit():
    check(Asking())
    for task in (Asking(sets={"near": [PROBLEM], "far": [PROBLEM, LONG]}), Asking(training=[PROBLEM, LONG])):
        with pytest.raises(ValueError, match=r"problem 'ask/long' has 18 tokens; the context .* room for 9"):
            check(task)
        check(task, room=18)
        assert {environment.num_closed for environment in task.made} == {1}


class Unrenderable(TwinRenderer):
    """Renderer that rejects some messages."""

    def opening(self, messages):
        if messages[-1].content == "odd":
            raise ValueError("the template has no form for 'odd'")
        return super().opening(messages)


def test_dropped_long_training_prompts_must_still_render():
    def checked(*training: Problem, held_out: Problem = PROBLEM) -> None:
        task = Asking(training=[PROBLEM, *training], sets={"one": [held_out]})
        check(task, renderer=Unrenderable(), long_prompts="drop")

    checked(LONG)
    with pytest.raises(ValueError, match="the template has no form for 'odd'"):
        checked(LONG, replace(PROBLEM, id="ask/odd", question="odd"))
    with pytest.raises(ValueError, match=r"problem 'ask/long' has 18 tokens"):
        checked(held_out=LONG)


def test_missing_evaluation_problems_are_refused_and_an_empty_set_is_named():
    with pytest.raises(ValueError, match="no evaluation problems in its set 'far'"):
        check(Asking(sets={"near": [PROBLEM], "far": []}))
    with pytest.raises(ValueError, match=r"the task has no evaluation problems: .* loop\.eval_every to 0"):
        check(Asking(sets={}))


def demonstrations(task: Asking, *, max_tokens: int, max_model_len: int) -> None:
    check_demonstrations(
        task.warmup_problems(seed=0),
        environments=Environments(make=task.environment),
        renderer=RENDERER,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )


def test_each_demonstrated_reply_and_the_whole_demonstration_must_fit():
    # 18 tokens of the prompt, 5 + 1, 16 between the turns and 10 + 1.
    task = Asking(training=[PROBLEM, LONG])
    demonstrations(task, max_tokens=11, max_model_len=51)
    with pytest.raises(ValueError, match=r"'ask/long' has 11 tokens in one reply, more than .*max_tokens=10"):
        demonstrations(task, max_tokens=10, max_model_len=51)
    with pytest.raises(ValueError, match=r"'ask/long' has 51 tokens with its prompt, .*max_model_len=50"):
        demonstrations(task, max_tokens=11, max_model_len=50)
    assert {environment.num_closed for environment in task.made} == {1}


@dataclass(kw_only=True)
class Odd(Counting):
    """Environment whose steps return no observation."""

    async def step(self, reply: Reply) -> Any:
        await super().step(reply)
        return None


class Unclosable(Counting):
    async def close(self) -> None:
        await super().close()
        raise KeyError("board")


def test_broken_environment_is_refused_unless_rollouts_may_fail(caplog):
    says = r"`step` returned None, which is not an Observation.* in turn 1 of problem 'ask/one'"
    with pytest.raises(ValueError, match=says):
        check(Asking(kind=Odd))
    with pytest.raises(ValueError, match=says):
        demonstrations(Asking(kind=Odd), max_tokens=20, max_model_len=100)
    unclosed = r"^closing problem 'ask/one': the environment raised KeyError\('board'\)"
    with pytest.raises(ValueError, match=unclosed):
        check(Asking(kind=partial(Unclosable, turns=1)))
    with caplog.at_level(logging.WARNING):
        check(Asking(kind=Odd), max_failed_rewards=0.5)
    assert "turn 1 of problem 'ask/one'" in caplog.text


@pytest.mark.parametrize(("limit", "fits"), [(9, False), (10, True), (99, True), (100, False)])
def test_sample_limit_must_be_met_by_some_samples_and_missed_by_others(limit, fits):
    task = Asking(training=[LONG, PROBLEM])
    says = rf"max_sample_tokens={limit}: must be from 10, .* to 99, .* None"
    with nullcontext() if fits else pytest.raises(ValueError, match=says):
        check(task, max_sample_tokens=limit, sampling__max_tokens=20, room=80)


class OneTurnRenderer(TwinRenderer):
    def check_multi_turn(self) -> None:
        raise ValueError("no second turn")


@dataclass(kw_only=True)
class Quiz(Counting):
    """Custom environment that ends after one reply and declares it."""

    turns: int = 0
    single_turn: bool = True


def test_several_turns_are_expected_unless_environment_or_limit_exclude_them():
    with pytest.raises(ValueError, match="no second turn"):
        check(Asking(), renderer=OneTurnRenderer(), episode__max_turns=2)
    check(Asking(), renderer=OneTurnRenderer(), episode__max_turns=1)
    quiz = Asking(kind=Quiz, sets={"held_out": [replace(PROBLEM, demonstration="first")]})
    check(quiz, renderer=OneTurnRenderer(), episode__max_turns=2)


def _second_question(rollout: Rollout) -> float:
    """Reward function of the whole episode."""
    assert [len(turn.messages) for turn in rollout.turns] == [1, 1]
    assert rollout.turns[0].text == "first"
    return float(rollout.turns[1].messages[0].content == "more 1")


def _above_mean(rollouts: Sequence[Rollout]) -> list[float]:
    """Reward function that needs a whole group."""
    assert {r.sample for r in rollouts} == {0, 1}
    return [len(r.text) - sum(len(s.text) for s in rollouts) / (len(rollouts) - 1) for r in rollouts]


def test_rubric_is_tried_on_the_demonstrated_episode_and_on_a_whole_group():
    criteria = (
        Criterion(name="turns", function=_second_question),
        GroupCriterion(name="group", function=_above_mean),
    )
    check(Asking(graded=Rubric(criteria=criteria)), group_size=2)


def _breaks_on_silence(rollout: Rollout) -> float:
    return 1 / len(rollout.text)


async def _asks_a_judge(rollout: Rollout) -> float:
    raise OSError("connection refused")


SILENCE = Rubric(criteria=(Criterion(name="own", function=_breaks_on_silence),))
JUDGED = Rubric(criteria=(Criterion(name="judge", function=_asks_a_judge),))


def test_failing_rubric_is_refused_unless_rewards_may_fail_or_a_judge_is_used(caplog):
    with pytest.raises(ValueError, match=r"the task's rubric fails: reward 'own' raised ZeroDivisionError"):
        check(Asking(graded=SILENCE))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        check(Asking(graded=SILENCE), max_failed_rewards=0.5)
        check(Asking(graded=JUDGED))
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    assert "reward 'judge' raised OSError('connection refused')" in caplog.text


def test_rubric_without_a_demonstration_is_tried_on_one_turn_and_a_failure_is_a_warning(caplog):
    asked = {"held_out": [replace(PROBLEM, demonstration="")]}
    with caplog.at_level(logging.WARNING):
        check(Asking(graded=SILENCE, sets=asked))
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    caplog.clear()
    check(Asking(graded=Rubric(criteria=(Criterion(name="told", function=_says_one),)), sets=asked))
    assert caplog.text == ""


def _says_one(rollout: Rollout) -> float:
    assert [m.content for m in rollout.messages[:1]] == ["one"]
    return 1.0
