"""A demonstrated conversation as a training sample.

Shape legend: N tokens of what a model is told, C tokens of a completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np

from rl.clock import run_now
from rl.errors import RunError
from rl.protocols import Environment
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import TokenSpan, supervised_sample
from rl.types import Completion, Observation, Problem, Prompt, Reply, Rollout, TrainingSample, Turn

STEP_TIMEOUT_S = 60.0
"""Longest time an environment may take outside of rollouts, to answer a demonstrated reply or to close."""


async def demonstrated(problem: Problem, environment: Environment, *, renderer: Renderer) -> TrainingSample:
    """The conversation of `demonstrated_rollout` as a training sample; the replies are trained on.

    Raises:
        ValueError: as that does.
    """
    rollout = await demonstrated_rollout(problem, environment, renderer=renderer)
    spans: list[TokenSpan] = []
    for turn in rollout.turns:
        spans += [
            TokenSpan(turn.prompt_ids, is_reply=False),
            TokenSpan(turn.completion.token_ids, is_reply=True),
        ]
    return supervised_sample(spans)


async def demonstrated_rollout(problem: Problem, environment: Environment, *, renderer: Renderer) -> Rollout:
    """The conversation in which each reply is the demonstrated one, as a rollout would have it.

    Raises:
        ValueError: there is no demonstration, it has more or fewer replies than the environment asks for, or
            the environment breaks; it names the problem.
    """
    replies = problem.demonstrations
    turns: list[Turn] = []
    try:
        if not replies:
            raise ValueError(f"problem {problem.id!r} has no demonstration to warm up on")
        messages = tuple(environment.opening())
        told = renderer.opening(messages)
        for number, text in enumerate(replies, start=1):
            completion = _as_completion(renderer.reply(text))
            observation = await _answer(environment, Reply(text=text, completion=completion), number, problem)
            turns.append(
                Turn(
                    messages=messages,
                    prompt_ids=told,
                    completion=completion,
                    text=text,
                    observation=observation,
                )
            )
            if bool(observation.messages) != (number < len(replies)):
                more = "goes on after" if observation.messages else "ends after"
                raise ValueError(
                    f"problem {problem.id!r}: its environment {more} reply {number} of the {len(replies)} of "
                    "its demonstration: must be a reply for each turn"
                )
            if observation.messages:
                messages = observation.messages
                told = renderer.continuation(messages, after=completion)
    finally:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await environment.close()
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=0, turns=tuple(turns))


def demonstrated_now(
    problems: Iterable[Problem], *, environment: Callable[[Problem], Environment], renderer: Renderer
) -> list[TrainingSample]:
    """`demonstrated` of each, from code that cannot await."""

    async def all_of_them() -> list[TrainingSample]:
        return [await demonstrated(p, environment(p), renderer=renderer) for p in problems]

    return run_now(all_of_them())


async def _answer(environment: Environment, reply: Reply, turn: int, problem: Problem) -> Observation:
    where = f"problem {problem.id!r}, reply {turn} of its demonstration: its environment"
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S) as deadline:
            return await environment.step(reply)
    except RunError:
        raise
    except Exception as error:
        if deadline.expired():
            raise ValueError(f"{where} took longer than {STEP_TIMEOUT_S:g} s to answer") from error
        raise ValueError(f"{where} raised {error!r}") from error


def _as_completion(reply: np.ndarray) -> Completion:
    return Completion(
        token_ids=reply,
        logprobs=np.full(len(reply), np.nan, dtype=np.float32),
        policy_versions=np.full(len(reply), -1, dtype=np.int32),
        finish_reason="stop",
    )
