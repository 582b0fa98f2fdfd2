"""What is checked of a task before anything starts: several evaluation sets, prompts, demonstrations."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import pytest

from actors.task_checks import check_demonstrations, check_sample_limit, check_task
from rl.loop import Loop
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Problem, Prompt, Reply, Rollout
from tests.support.conversations import Counting, TwinRenderer

RENDERER = TwinRenderer()
PROBLEM = Problem(id="ask/one", question="one", answer="1", demonstration=("first", "second"))
LONG = Problem(id="ask/long", question="a longer one", answer="1", demonstration=("first", "the second"))


@dataclass(kw_only=True)
class Asking:
    """A task of two turns."""

    sets: Mapping[str, Sequence[Problem]] = field(default_factory=lambda: {"held_out": [PROBLEM]})
    training: Sequence[Problem] = (PROBLEM,)
    made: list[Counting] = field(default_factory=list)
    step_timeout_s: float = 60.0

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        return cycle(self.training)

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        return cycle(self.training)

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return self.sets

    def environment(self, problem: Problem) -> Counting:
        self.made.append(Counting(problem=problem, turns=1))
        return self.made[-1]

    def rubric(self, *, seed: int) -> Rubric:
        return Rubric(criteria=(Criterion(name="length", function=_length),), correct=_says_second)


def _length(rollout: Rollout) -> float:
    return float(len(rollout.text))


def _says_second(rollout: Rollout) -> bool:
    return rollout.text == "second"


def check(
    task: Asking, *, renderer: Renderer = RENDERER, max_prompt_tokens: int = 9, **settings: Any
) -> Prompt:
    return check_task(
        task,
        environments=tried(task),
        renderer=renderer,
        max_prompt_tokens=max_prompt_tokens,
        seed=0,
        time_limit_s=5.0,
        **settings,
    )


def tried(task: Asking) -> TriedEnvironments:
    return TriedEnvironments(
        make=task.environment, threads=EnvironmentThreads(grace_s=0.05), step_timeout_s=task.step_timeout_s
    )


def test_demonstrations_of_every_set_and_of_training_have_to_fit():
    check(Asking())
    for task in (Asking(sets={"near": [PROBLEM], "far": [PROBLEM, LONG]}), Asking(training=[PROBLEM, LONG])):
        with pytest.raises(ValueError, match=r"problem 'ask/long' has 18 tokens; the context .* room for 9"):
            check(task)
        check(task, max_prompt_tokens=18)
        assert {environment.num_closed for environment in task.made} == {1}


class Unrenderable(TwinRenderer):
    """Has no form for some messages."""

    def opening(self, messages):
        if messages[-1].content == "odd":
            raise ValueError("the template has no form for 'odd'")
        return super().opening(messages)


def test_where_long_prompts_are_dropped_those_of_training_may_be_long_but_must_have_a_form():
    def checked(*training: Problem, held_out: Problem = PROBLEM) -> None:
        task = Asking(training=[PROBLEM, *training], sets={"one": [held_out]})
        check(task, renderer=Unrenderable(), drops_long_prompts=True)

    checked(LONG)
    with pytest.raises(ValueError, match="the template has no form for 'odd'"):
        checked(LONG, replace(PROBLEM, id="ask/odd", question="odd"))
    with pytest.raises(ValueError, match=r"problem 'ask/long' has 18 tokens"):
        checked(held_out=LONG)


def test_a_task_without_evaluation_problems_is_refused_and_an_empty_set_by_its_name():
    with pytest.raises(ValueError, match="no evaluation problems in its set 'far'"):
        check(Asking(sets={"near": [PROBLEM], "far": []}))
    with pytest.raises(ValueError, match=r"the task has no evaluation problems: .* loop\.eval_every to 0"):
        check(Asking(sets={}))


@pytest.mark.parametrize("sets", [{}, {"near": []}])
def test_a_run_that_does_not_evaluate_needs_no_evaluation_problems(sets):
    assert check(Asking(sets=sets), evaluates=False).problem == PROBLEM


def demonstrations(task: Asking, *, max_tokens: int, max_model_len: int) -> None:
    check_demonstrations(
        task.warmup_problems(seed=0),
        environments=tried(task),
        renderer=RENDERER,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )


def test_every_reply_of_a_demonstration_and_all_its_turns_have_to_fit():
    # 18 of the prompt, 5 + 1, 16 between the turns and 10 + 1.
    task = Asking(training=[PROBLEM, LONG])
    demonstrations(task, max_tokens=11, max_model_len=51)
    with pytest.raises(ValueError, match=r"'ask/long' has 11 tokens in one reply, more than .*max_tokens=10"):
        demonstrations(task, max_tokens=10, max_model_len=51)
    with pytest.raises(ValueError, match=r"'ask/long' has 51 tokens with its prompt, .*max_model_len=50"):
        demonstrations(task, max_tokens=11, max_model_len=50)
    assert {environment.num_closed for environment in task.made} == {1}


def test_demonstrations_that_do_not_go_with_their_environment_are_refused_also_while_a_loop_runs():
    task = Asking(training=[replace(PROBLEM, demonstration="first")])

    async def main() -> None:
        demonstrations(task, max_tokens=20, max_model_len=100)

    with pytest.raises(ValueError, match=r"'ask/one': its environment goes on after reply 1 of the 1"):
        asyncio.run(main())


@dataclass(kw_only=True)
class Odd(Counting):
    """Answers with what is no observation."""

    async def step(self, reply: Reply) -> Any:
        await super().step(reply)
        return None


@dataclass(kw_only=True)
class Answerless(Asking):
    def environment(self, problem: Problem) -> Odd:
        return Odd(problem=problem)


def test_an_environment_that_breaks_is_refused_unless_rollouts_may_fail(caplog):
    says = r"^turn 1 of problem 'ask/one': `step` returned None, which is no Observation"
    with pytest.raises(ValueError, match=says):
        check(Answerless())
    with pytest.raises(ValueError, match=says):
        demonstrations(Answerless(), max_tokens=20, max_model_len=100)
    with caplog.at_level(logging.WARNING):
        check(Answerless(), rewards_may_fail=True)
    assert "turn 1 of problem 'ask/one'" in caplog.text


def test_a_demonstration_that_does_not_go_with_its_environment_is_a_warning_where_nothing_warms_up(caplog):
    with caplog.at_level(logging.WARNING):
        check(Asking(sets={"one": [replace(PROBLEM, demonstration="first")]}))
    assert "goes on after reply 1 of the 1 of its demonstration" in caplog.text


@dataclass(kw_only=True)
class Silent(Counting):
    def opening(self) -> Any:
        return None


@dataclass(kw_only=True)
class Speechless(Asking):
    """From its second problem on."""

    def environment(self, problem: Problem) -> Counting:
        return (Silent if problem is LONG else Counting)(problem=problem)


def test_an_environment_that_does_not_open_is_refused_by_its_problem_also_where_rollouts_may_fail():
    says = r"problem 'ask/long' \(Silent\) does not open: .* is None, which is no sequence of Message"
    with pytest.raises(ValueError, match=says):
        check(Speechless(training=[PROBLEM, LONG]), max_prompt_tokens=18, rewards_may_fail=True)


@pytest.mark.parametrize(("limit", "fits"), [(9, False), (10, True), (99, True), (100, False), (None, True)])
def test_a_limit_of_samples_is_one_that_some_sample_meets_and_some_misses(limit, fits):
    loop = Loop.Config(max_sample_tokens=limit)
    task = Asking(training=[LONG, PROBLEM])

    def check_limit() -> None:
        check_sample_limit(
            loop,
            task.train_problems(seed=0),
            environments=tried(task),
            renderer=RENDERER,
            max_model_len=100,
        )

    if fits:
        check_limit()
    else:
        with pytest.raises(
            ValueError, match=rf"max_sample_tokens={limit}: must be from 10, .* to 99, .* None"
        ):
            check_limit()


class OneTurnRenderer(TwinRenderer):
    def check_multi_turn(self) -> None:
        raise ValueError("no second turn")


@dataclass(kw_only=True)
class Quiz(Counting):
    """An environment of somebody's own that ends after one reply, and says so."""

    turns: int = 0
    single_turn: bool = True


@dataclass(kw_only=True)
class Quizzing(Asking):
    def environment(self, problem: Problem) -> Quiz:
        return Quiz(problem=problem)


def test_several_turns_are_expected_unless_environment_or_limit_say_otherwise():
    def check_turns(task: Asking, *, max_turns: int | None = None) -> None:
        check(task, renderer=OneTurnRenderer(), max_turns=max_turns)

    for max_turns in (None, 2):
        with pytest.raises(ValueError, match="no second turn"):
            check_turns(Asking(), max_turns=max_turns)
    check_turns(Asking(), max_turns=1)
    check_turns(Quizzing(sets={"held_out": [replace(PROBLEM, demonstration="first")]}))


@dataclass(kw_only=True)
class Graded(Asking):
    """With a rubric of its own."""

    graded: Rubric

    def rubric(self, *, seed: int) -> Rubric:
        return self.graded


def _second_question(rollout: Rollout) -> float:
    """Of the episode as its environment had it."""
    assert [len(turn.messages) for turn in rollout.turns] == [1, 1]
    assert rollout.turns[0].text == "first"
    return float(rollout.turns[1].messages[0].content == "more 1")


def _above_mean(rollouts: Sequence[Rollout]) -> list[float]:
    """Of a group alone."""
    assert {r.sample for r in rollouts} == {0, 1}
    return [len(r.text) - sum(len(s.text) for s in rollouts) / (len(rollouts) - 1) for r in rollouts]


def test_a_rubric_is_tried_on_the_demonstrated_episode_and_on_a_whole_group():
    criteria = (
        Criterion(name="turns", function=_second_question),
        GroupCriterion(name="group", function=_above_mean),
    )
    check(Graded(graded=Rubric(criteria=criteria)))


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_function_of_a_group_that_always_raises_is_refused_whatever_the_groups_size(num_samples):
    def always_raises(rollouts: Sequence[Rollout]) -> list[float]:
        raise NameError("scores")

    broken = Rubric(criteria=(GroupCriterion(name="group", function=always_raises),))
    with pytest.raises(ValueError, match=r"the task's rubric fails: reward 'group' raised NameError"):
        check(Graded(graded=broken), num_samples=num_samples)


def _breaks_on_silence(rollout: Rollout) -> float:
    return 1 / len(rollout.text)


async def _asks_a_judge(rollout: Rollout) -> float:
    raise OSError("connection refused")


SILENCE = Rubric(criteria=(Criterion(name="own", function=_breaks_on_silence),))
JUDGED = Rubric(criteria=(Criterion(name="judge", function=_asks_a_judge),))


def test_a_rubric_that_fails_stops_the_run_unless_rewards_may_fail_or_a_judge_is_asked(caplog):
    with pytest.raises(ValueError, match=r"the task's rubric fails: reward 'own' raised ZeroDivisionError"):
        check(Graded(graded=SILENCE))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        check(Graded(graded=SILENCE), rewards_may_fail=True)
        check(Graded(graded=JUDGED))
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    assert "reward 'judge' raised OSError('connection refused')" in caplog.text


def test_where_no_episode_is_demonstrated_one_turn_is_tried_and_a_failure_is_a_warning(caplog):
    asked = {"held_out": [replace(PROBLEM, demonstration="")]}
    with caplog.at_level(logging.WARNING):
        check(Graded(graded=SILENCE, sets=asked))
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    caplog.clear()
    check(Graded(graded=Rubric(criteria=(Criterion(name="told", function=_says_one),)), sets=asked))
    assert caplog.text == ""


def _says_one(rollout: Rollout) -> float:
    assert [m.content for m in rollout.messages[:1]] == ["one"]
    return 1.0
