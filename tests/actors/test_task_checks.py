"""Checks of a task before a run starts: evaluation sets, prompts, environments, demonstrations,
rubrics.
"""

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest

from actors.preflight import task as task_checks
from actors.preflight.task import check_task
from rl.config.tree import rebuild
from rl.loop.loop import Loop
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import Renderer
from rl.rollouts.rewards import check_sendable
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.types import Problem, Reply, Rollout
from tests.support.conversations import Counting, Factory, TwinRenderer
from tests.support.fakes import RubricRewarder
from tests.support.scoring_functions import start_process


@pytest.fixture(autouse=True)
def scored_here(monkeypatch):
    """Score in this process, where a function may be a lambda; tests of the process undo this."""
    with monkeypatch.context() as patch:
        patch.setattr(task_checks, "RewardProcess", LocalRewards)
        patch.setattr(task_checks, "check_sendable", lambda rubric, to_actors: b"")
        yield patch


class LocalRewards(RubricRewarder):
    def __init__(self, *, rubric: Rubric, time_limit_s: float, start_timeout_s: float) -> None:
        super().__init__(rubric=rubric)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to end."""


PROBLEM = Problem(id="ask/one", question="one", answer="1", demonstration=("first", "second"))
LONG = Problem(
    id="ask/long", question="a longer one", answer="1", demonstration=("first", "the second")
)


def rubric_of(function: Callable[[Rollout], Any], *, name: str = "own") -> Rubric:
    return Rubric(criteria=(Criterion(name=name, function=function),))


TWO_TURNS = partial(Counting, turns=1)
LENGTH = rubric_of(lambda rollout: float(len(rollout.text)))


def check(
    *,
    training: Sequence[Problem] = (PROBLEM,),
    sets: Mapping[str, Sequence[Problem]] | None = None,
    kind: Callable[..., Counting] = TWO_TURNS,
    rubric: Rubric = LENGTH,
    renderer: Renderer | None = None,
    room: int = 9,
    warms_up: bool = False,
    in_actors: bool = False,
    start_timeout_s: float = 60.0,
    **edits: Any,
) -> list[int]:
    """Check a task of two turns with `room` tokens for prompts; return how often each environment
    was closed.

    `edits` are fields of the loop.
    """
    loop = rebuild(Loop.Config(), {path.replace("__", "."): value for path, value in edits.items()})
    environments = Factory(kind)
    task: Any = SimpleNamespace(
        train_problems=lambda seed: cycle(training),
        warmup_problems=lambda seed: cycle(training),
        eval_sets=lambda: {"held_out": [PROBLEM]} if sets is None else sets,
        rubric=lambda seed: rubric,
    )
    check_task(
        task,
        loop=loop,
        max_model_len=room + loop.sampling.max_tokens,
        time_limit_s=30.0,
        seed=0,
        environments=Environments(make=environments),
        renderer=renderer or TwinRenderer(),
        warms_up=warms_up,
        rewards_in_actors=in_actors,
        start_timeout_s=start_timeout_s,
    )
    return environments.closed


@pytest.mark.parametrize(
    "problems", [{"sets": {"a": [PROBLEM], "b": [LONG]}}, {"training": [PROBLEM, LONG]}]
)
def test_prompts_of_every_evaluation_set_and_of_training_must_fit(problems):
    check()
    with pytest.raises(
        ValueError, match=r"problem 'ask/long' has 18 tokens; the context .* room for 9"
    ):
        check(**problems)
    assert set(check(**problems, room=18)) == {1}


def test_trial_of_the_rubric_has_the_time_to_start_that_the_run_has(scored_here):
    scored_here.undo()
    with pytest.raises(
        ValueError, match=r"cannot be used: .* within 0\.01 s \(reward\.start_timeout_s\)"
    ):
        check(rubric=rubric_of(start_process), start_timeout_s=0.01)


class Unrenderable(TwinRenderer):
    """Renderer that rejects some messages."""

    def opening(self, messages, *, tools=()):
        if messages[-1].content == "odd":
            raise ValueError("the template has no form for 'odd'")
        return super().opening(messages, tools=tools)


def test_dropped_long_training_prompts_must_still_render():
    drop: dict[str, Any] = {"renderer": Unrenderable(), "long_prompts": "drop"}
    check(training=[PROBLEM, LONG], **drop)
    with pytest.raises(ValueError, match="the template has no form for 'odd'"):
        check(training=[LONG, replace(PROBLEM, id="ask/odd", question="odd")], **drop)
    with pytest.raises(ValueError, match=r"problem 'ask/long' has 18 tokens"):
        check(sets={"one": [LONG]}, **drop)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ({"near": [PROBLEM], "far": []}, "no evaluation problems in its set 'far'"),
        ({}, r"the task has no evaluation problems: .* loop\.eval_every to 0"),
    ],
)
def test_missing_evaluation_problems_are_refused_and_an_empty_set_is_named(sets, says):
    with pytest.raises(ValueError, match=says):
        check(sets=sets)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "says"),
    [
        (10, 51, r"'ask/long' has 11 tokens in one reply, more than .*max_tokens=10"),
        # 18 tokens of the prompt, 5 + 1, 16 between the turns and 10 + 1.
        (11, 50, r"'ask/long' has 51 tokens with its prompt, .*max_model_len=50"),
    ],
)
def test_each_demonstrated_reply_and_the_whole_demonstration_must_fit(
    max_tokens, max_model_len, says
):
    task: dict[str, Any] = {"training": [PROBLEM, LONG], "warms_up": True}
    assert set(check(**task, sampling__max_tokens=11, room=40)) == {1}
    with pytest.raises(ValueError, match=says):
        check(**task, sampling__max_tokens=max_tokens, room=max_model_len - max_tokens)


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
        check(kind=Odd)
    with pytest.raises(ValueError, match=says):
        check(kind=Odd, max_failed_rewards=0.5, warms_up=True)
    unclosed = r"^closing problem 'ask/one': the environment raised KeyError\('board'\)"
    with pytest.raises(ValueError, match=unclosed):
        check(kind=Unclosable)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(kind=Odd, max_failed_rewards=0.5)
    assert "turn 1 of problem 'ask/one'" in caplog.text


@pytest.mark.parametrize(("limit", "fits"), [(9, False), (10, True), (99, True), (100, False)])
def test_sample_limit_must_be_met_by_some_samples_and_missed_by_others(limit, fits):
    says = rf"max_sample_tokens={limit}: must be from 10, .* to 99, .* None"
    with nullcontext() if fits else pytest.raises(ValueError, match=says):
        check(training=[LONG, PROBLEM], max_sample_tokens=limit, sampling__max_tokens=20, room=80)


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
        check(renderer=OneTurnRenderer(), episode__max_turns=2)
    check(renderer=OneTurnRenderer(), episode__max_turns=1)
    sets = {"held_out": [replace(PROBLEM, demonstration="first")]}
    check(kind=Quiz, sets=sets, renderer=OneTurnRenderer(), episode__max_turns=2)
    with pytest.raises(ValueError, match="no second turn"):  # Some problems have several turns.
        check(
            kind=mixed,
            sets=sets,
            training=[LONG],
            room=18,
            renderer=OneTurnRenderer(),
            episode__max_turns=2,
        )


def mixed(problem: Problem) -> Counting:
    return Counting(problem=problem) if problem.id == LONG.id else Quiz(problem=problem)


def _second_question(rollout: Rollout) -> float:
    """Reward function of the whole episode."""
    assert [len(turn.messages) for turn in rollout.turns] == [1, 1]
    assert rollout.turns[0].text == "first"
    return float(rollout.turns[1].messages[0].content == "more 1")


def _above_mean(rollouts: Sequence[Rollout]) -> list[float]:
    """Reward function that needs a whole group."""
    assert {r.sample for r in rollouts} == {0, 1}
    return [
        len(r.text) - sum(len(s.text) for s in rollouts) / (len(rollouts) - 1) for r in rollouts
    ]


def test_rubric_is_tried_on_the_demonstrated_episode_and_on_a_whole_group():
    criteria = (
        Criterion(name="turns", function=_second_question),
        GroupCriterion(name="group", function=_above_mean),
    )
    check(rubric=Rubric(criteria=criteria), group_size=2)


async def _asks_a_judge(rollout: Rollout) -> float:
    raise OSError("connection refused")


SILENCE = rubric_of(lambda rollout: 1 / len(rollout.text))


def test_failing_rubric_is_refused_unless_rewards_may_fail_or_a_judge_is_used(caplog):
    with pytest.raises(
        ValueError, match=r"the task's rubric fails: reward 'own' raised ZeroDivisionError"
    ):
        check(rubric=SILENCE)
    with pytest.raises(
        ValueError, match="the task's rubric fails: reward 'own' gave nan, but must give a finite"
    ):
        check(rubric=rubric_of(lambda rollout: math.nan))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        check(rubric=SILENCE, max_failed_rewards=0.5)
        check(rubric=rubric_of(_asks_a_judge, name="judge"))
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    assert "reward 'judge' raised OSError('connection refused')" in caplog.text


def test_rubric_without_a_demonstration_is_tried_on_one_turn_and_a_failure_is_a_warning(caplog):
    sets = {"held_out": [replace(PROBLEM, demonstration="")]}
    with caplog.at_level(logging.WARNING):
        check(rubric=SILENCE, sets=sets)
    assert "reward 'own' raised ZeroDivisionError" in caplog.text
    caplog.clear()
    check(rubric=rubric_of(_says_one), sets=sets)
    assert caplog.text == ""


def _says_one(rollout: Rollout) -> float:
    assert [m.content for m in rollout.messages[:1]] == ["one"]
    return 1.0


def test_rubric_is_tried_in_a_reward_process(scored_here):
    scored_here.undo()
    check(rubric=rubric_of(start_process))
    with pytest.raises(
        ValueError, match=r"cannot be used: .* cannot be sent to the reward process .*lambda"
    ):
        check(rubric=LENGTH)


class InScript:
    """Reward function of the script that was started."""

    def __call__(self, rollout: Rollout) -> float:
        return 1.0


def test_function_of_the_started_script_is_refused_where_actors_need_it(scored_here, monkeypatch):
    scored_here.undo()
    monkeypatch.setattr(InScript, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "InScript", InScript, raising=False)
    assert check_sendable(rubric_of(InScript()))
    with pytest.raises(
        ValueError, match=r"InScript is defined in the script that was started, .*num_procs=0"
    ):
        check(rubric=rubric_of(InScript()), in_actors=True)


def test_functions_that_compare_rollouts_need_a_group():
    rubric = Rubric(criteria=(GroupCriterion(name="group", function=_above_mean),))
    single: dict[str, Any] = {"group_size": 1, "advantage__baseline": "batch_mean"}
    with pytest.raises(
        ValueError, match="group_size=1: the reward functions group compare the rollouts"
    ):
        check(rubric=rubric, **single)
    check(**single)
