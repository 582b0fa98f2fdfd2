"""A demonstrated conversation as a training sample.

Shape legend: N tokens of what a model is told, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rl.clock import run_now
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import TokenSpan, supervised_sample
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Completion, Message, Problem, Prompt, Reply, Rollout, TrainingSample, Turn


class UnfitDemonstrationError(ValueError):
    """A problem has no demonstration, or one with more or fewer replies than its environment asks for."""


async def demonstrated(
    problem: Problem, environments: TriedEnvironments, *, renderer: Renderer
) -> TrainingSample:
    """The conversation of `demonstrated_rollout` as a training sample; the replies are trained on.

    Raises:
        ValueError: as that does.
    """
    rollout = await demonstrated_rollout(problem, environments, renderer=renderer)
    spans: list[TokenSpan] = []
    for turn in rollout.turns:
        spans += [
            TokenSpan(turn.prompt_ids, is_reply=False),
            TokenSpan(turn.completion.token_ids, is_reply=True),
        ]
    return supervised_sample(spans)


async def demonstrated_rollout(
    problem: Problem, environments: TriedEnvironments, *, renderer: Renderer
) -> Rollout:
    """The conversation in which each reply is the demonstrated one, as a rollout would have it.

    Raises:
        UnfitDemonstrationError: names the problem.
        ValueError: its environment breaks, or the renderer refuses what it says; names the problem.
    """
    replies = problem.demonstrations
    if not replies:
        raise UnfitDemonstrationError(f"problem {problem.id!r} has no demonstration to warm up on")
    turns: list[Turn] = []
    async with environments.opened(problem) as environment:
        messages = environment.messages
        for number, text in enumerate(replies, start=1):
            told = _told(problem, turns, messages, renderer=renderer)
            completion = _as_completion(renderer.reply(text))
            observation = await environment.step(Reply(text=text, completion=completion), turn=number)
            turns.append(
                Turn(
                    messages=messages,
                    prompt_ids=told,
                    completion=completion,
                    text=text,
                    observation=observation,
                )
            )
            messages = tuple(observation.messages)
            if bool(messages) != (number < len(replies)):
                more = "goes on after" if messages else "ends after"
                raise UnfitDemonstrationError(
                    f"problem {problem.id!r}: its environment {more} reply {number} of the {len(replies)} of "
                    "its demonstration: must be a reply for each turn"
                )
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=0, turns=tuple(turns))


def demonstrated_now(
    problems: Iterable[Problem], environments: TriedEnvironments, *, renderer: Renderer
) -> list[TrainingSample]:
    """`demonstrated` of each, from code that cannot await."""

    async def all_of_them() -> list[TrainingSample]:
        return [await demonstrated(problem, environments, renderer=renderer) for problem in problems]

    return run_now(all_of_them())


def _told(
    problem: Problem, turns: Sequence[Turn], messages: Sequence[Message], *, renderer: Renderer
) -> np.ndarray:
    """[N] int32: the messages after these turns."""
    try:
        if not turns:
            return renderer.opening(messages)
        return renderer.continuation(messages, after=turns[-1].completion)
    except Exception as error:
        raise ValueError(
            f"turn {len(turns) + 1} of problem {problem.id!r}: the renderer refused the environment's "
            f"messages ({error!r})"
        ) from error


def _as_completion(reply: np.ndarray) -> Completion:
    return Completion(
        token_ids=reply,
        logprobs=np.full(len(reply), np.nan, dtype=np.float32),
        policy_versions=np.full(len(reply), -1, dtype=np.int32),
        finish_reason="stop",
    )
