"""Rewards of a recorded step computed again by the task's reward functions.

A grader that fails without a word, or scores that reach the wrong rollouts, leave a ledger in which
everything follows from the recorded rewards. Only the task itself can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rl.agents.task import get_program
from rl.ledger.step import LedgerStep
from rl.rollouts.environment import Environments
from rl.rollouts.group import Group
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Rubric
from rl.tasks.task import Task
from rl.types import Message, Problem, Prompt, Rollout
from rl.utils.threads import run_now


@dataclass(frozen=True, kw_only=True, slots=True)
class Regraded:
    """What became of rewards that were computed again."""

    num_rewards: int = 0
    differences: tuple[str, ...] = ()
    """The first reward that differs; empty if all are the same."""
    why_not: str = ""
    """Why nothing was computed again."""


def grade_again(
    step: LedgerStep, groups: list[Group], *, task: Task, seed: int, renderer: Renderer
) -> Regraded:
    """Compute the rewards of a step's rollouts again, in this process.

    Args:
        groups: of `rl.ledger.replay.make_groups`, which know no text.
        seed: of the run.
    """
    rubric = task.rubric(seed=seed)
    if get_program(task) is not None:
        return Regraded(why_not="they are of an agent's output, which the ledger does not have")
    if rubric.has_async_functions:
        return Regraded(why_not="they are of a judge or another service")
    problems = _find_problems(task, {group.number for group in groups}, seed=seed)
    environments = Environments(make=task.environment)
    num_rewards = 0
    for group in groups:
        problem = problems.get(group.number)
        if problem is None or problem.id != group.rollouts[0].prompt.problem.id:
            return Regraded(why_not="the task's problems are others than those of the run")
        messages = run_now(_open(problem, environments))
        if messages is None:
            return Regraded(why_not="they are of conversations, which the ledger has as tokens")
        # A function that compares the rollouts of a group needs those that failed too.
        described = step.groups[groups.index(group)]
        if rubric.has_group_functions and described["num_failed"]:
            continue
        rollouts = [_read(rollout, problem, messages, renderer) for rollout in group.rollouts]
        scores = run_now(rubric.score_group(rollouts))
        for rollout, recorded, score in zip(rollouts, group.scores, scores, strict=True):
            num_rewards += 1
            if score.failure is None and score.reward == recorded.reward:
                continue
            if not _repeats(rubric, rollouts):
                return Regraded(why_not="its reward functions give another one at each call")
            now = f"{score.reward:g}" if score.failure is None else score.failure
            where = f"problem {problem.id!r}, sample {rollout.sample}"
            return Regraded(
                num_rewards=num_rewards,
                differences=(f"{where}: reward: {recorded.reward:g} and now {now}",),
            )
    return Regraded(num_rewards=num_rewards)


def _find_problems(task: Task, numbers: Iterable[int], *, seed: int) -> Mapping[int, Problem]:
    """Return the task's training problems of these numbers, as far as there are any."""
    source = task.train_problems(seed=seed)
    problem_at = getattr(source, "problem", None)
    if problem_at is not None:
        return {number: problem_at(number) for number in numbers}
    wanted = set(numbers)
    found: dict[int, Problem] = {}
    for number, problem in enumerate(source):
        if number in wanted:
            found[number] = problem
        if len(found) == len(wanted):
            break
    return found


async def _open(problem: Problem, environments: Environments) -> tuple[Message, ...] | None:
    """Return the messages of a problem whose episodes have one turn; None for any other."""
    async with environments.opened([problem]) as ((calls,),):
        return calls.messages if getattr(calls.environment, "single_turn", False) else None


def _read(
    rollout: Rollout, problem: Problem, messages: tuple[Message, ...], renderer: Renderer
) -> Rollout:
    """Return a rollout with the texts of its tokens."""
    (turn,) = rollout.turns
    text = renderer.text(turn.completion.token_ids, prompt_ids=turn.prompt_ids)
    return replace(
        rollout,
        prompt=Prompt(problem=problem, token_ids=rollout.prompt.token_ids),
        turns=(replace(turn, messages=messages, text=text),),
    )


def _repeats(rubric: Rubric, rollouts: list[Rollout]) -> bool:
    """Return whether the reward functions give the same rewards twice."""
    first, second = (run_now(rubric.score_group(rollouts)) for _ in range(2))
    return [score.reward for score in first] == [score.reward for score in second]
