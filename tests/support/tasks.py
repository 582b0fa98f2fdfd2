"""Rollouts and scores for given replies to a task's problems."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from itertools import islice

import numpy as np

from rl.rollouts.rubric import Rubric
from rl.tasks.task import Task
from rl.types import FinishReason, Problem, Prompt, Reply, Rollout, Score, Turn
from tests.support.fakes import completion


def played(
    task: Task, problem: Problem, *replies: str, finish_reason: FinishReason = "stop"
) -> Rollout:
    """Return the complete episode of these replies, one for each turn of the environment."""
    return asyncio.run(_play(task, problem, replies, finish_reason))


async def _play(
    task: Task, problem: Problem, replies: Sequence[str], finish_reason: FinishReason = "stop"
) -> Rollout:
    environment = task.environment(problem)
    told = tuple(environment.opening())
    turns = []
    for text in replies:
        assert told, f"the environment of {problem.id} ended before {text!r}"
        made = completion(text, finish_reason=finish_reason)
        observation = await environment.step(Reply(text=text, completion=made))
        asked = _ids("".join(m.content for m in told))
        turns.append(
            Turn(
                messages=told, prompt_ids=asked, completion=made, text=text, observation=observation
            )
        )
        told = tuple(observation.messages)
    assert not told, f"the environment of {problem.id} asks for more than {replies}"
    await environment.close()
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=0, turns=tuple(turns))


def scored(
    task: Task, problem: Problem, *replies: str, finish_reason: FinishReason = "stop"
) -> Score:
    """Return the score of an episode by the pickled rubric, as in a reward actor."""
    rubric: Rubric = pickle.loads(pickle.dumps(task.rubric(seed=0)))
    return rubric.score(played(task, problem, *replies, finish_reason=finish_reason))


def demonstrated_scores(task: Task, num: int = 200) -> list[tuple[Problem, Score]]:
    """Return the warm-up's problems with the scores of their demonstrations."""

    async def play() -> list[Rollout]:
        problems = islice(task.warmup_problems(seed=0), num)
        return [await _play(task, p, p.demonstrations) for p in problems]

    rubric = task.rubric(seed=0)
    return [(r.prompt.problem, rubric.score(r)) for r in asyncio.run(play())]


def ids(task: Task, *, seed: int, num: int = 100) -> list[str]:
    """Return the ids of the first training problems."""
    return [p.id for p in islice(task.train_problems(seed=seed), num)]


def _ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
