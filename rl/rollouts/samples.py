"""Training samples from rollouts and from demonstrations.

Shape legend: T tokens of a sequence, N tokens of a prompt, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.rollouts.environment import TriedEnvironments, environment_errors
from rl.rollouts.renderer import Renderer
from rl.types import Completion, Message, Problem, Prompt, Reply, Rollout, TrainingSample, Turn
from rl.utils.threads import run_now


class UnfitDemonstrationError(ValueError):
    """A problem has no demonstration, or its number of replies does not fit the environment."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A part of a demonstrated conversation."""

    token_ids: np.ndarray
    """[N] or [C] int32."""
    is_reply: bool


def policy_sample(rollout: Rollout, *, advantages_C: np.ndarray, temperature: float) -> TrainingSample:
    """Return the rollout's tokens with a mask over those that the model produced.

    Args:
        advantages_C: one for each token that the model produced, turn after turn.

    Raises:
        ValueError: the number of advantages differs from the number of tokens.
    """
    if len(advantages_C) != rollout.num_completion_tokens:
        raise ValueError(
            f"advantages_C has {len(advantages_C)} entries for the {rollout.num_completion_tokens} tokens "
            f"that the model produced for problem {rollout.prompt.problem.id!r}"
        )
    ends = np.cumsum([len(turn.completion.token_ids) for turn in rollout.turns])
    advantages = np.split(advantages_C, ends[:-1])

    def joined(of_turn: Callable[[int, Completion], np.ndarray], *, prompt: float) -> np.ndarray:
        """Return [T]: the turns' values, and `prompt` at tokens of prompts."""
        parts = []
        for i, turn in enumerate(rollout.turns):
            values_C = of_turn(i, turn.completion)
            parts += [np.full(len(turn.prompt_ids), prompt, dtype=values_C.dtype), values_C]
        return np.concatenate(parts)

    return TrainingSample(
        token_ids=np.concatenate(
            [ids for t in rollout.turns for ids in (t.prompt_ids, t.completion.token_ids)]
        ).astype(np.int32),
        mask=joined(lambda i, c: np.ones(len(c.token_ids), dtype=bool), prompt=False),
        generator_logprobs=joined(lambda i, c: c.logprobs.astype(np.float32), prompt=np.nan),
        advantages=joined(lambda i, c: advantages[i].astype(np.float32), prompt=0.0),
        policy_versions=joined(lambda i, c: c.policy_versions.astype(np.int32), prompt=-1),
        temperature=temperature,
    )


def supervised_sample(spans: Sequence[TokenSpan]) -> TrainingSample:
    """Return demonstrated replies as a sample for a supervised loss, with advantage one."""
    mask = np.concatenate([np.full(len(span.token_ids), span.is_reply) for span in spans])
    mask[0] = False  # the first token is never a target
    num_tokens = len(mask)
    return TrainingSample(
        token_ids=np.concatenate([span.token_ids for span in spans]).astype(np.int32),
        mask=mask,
        generator_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.ones(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def demonstration_sample(prompt_T: np.ndarray, completion_C: np.ndarray) -> TrainingSample:
    """Return a demonstration of one turn as a sample."""
    return supervised_sample([TokenSpan(prompt_T, is_reply=False), TokenSpan(completion_C, is_reply=True)])


def cut(sample: TrainingSample, *, max_tokens: int) -> TrainingSample:
    """Return the first tokens of a sample."""
    arrays: dict[str, Any] = {
        name: value[:max_tokens]
        for name in TrainingSample.__slots__
        if isinstance(value := getattr(sample, name), np.ndarray)
    }
    return replace(sample, **arrays)


async def demonstrated(
    problem: Problem, environments: TriedEnvironments, *, renderer: Renderer
) -> TrainingSample:
    """Return the conversation of `demonstrated_rollout` as a sample; raises as that does."""
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
    """Play the problem's demonstration against its environment and return the rollout.

    Raises:
        UnfitDemonstrationError: there is no demonstration, or it has too many or too few replies.
        ValueError: the environment breaks, or the renderer refuses its messages; names the problem.
    """
    replies = problem.demonstrations
    if not replies:
        raise UnfitDemonstrationError(f"problem {problem.id!r} has no demonstration to warm up on")
    turns: list[Turn] = []
    async with environments.opened(problem) as environment:
        messages = environment.messages
        for number, text in enumerate(replies, start=1):
            prompt_ids = _prompt_ids(problem, turns, messages, renderer=renderer)
            completion = _as_completion(renderer.reply(text))
            with environment_errors(f"turn {number} of problem {problem.id!r}"):
                observation = await environment.step(Reply(text=text, completion=completion))
            turns.append(
                Turn(
                    messages=messages,
                    prompt_ids=prompt_ids,
                    completion=completion,
                    text=text,
                    observation=observation,
                )
            )
            messages = tuple(observation.messages)
            if bool(messages) != (number < len(replies)):
                more = "continues after" if messages else "ends after"
                raise UnfitDemonstrationError(
                    f"problem {problem.id!r}: its environment {more} reply {number} of the {len(replies)} of "
                    "its demonstration: must be a reply for each turn"
                )
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=0, turns=tuple(turns))


def demonstrated_now(
    problems: Iterable[Problem], environments: TriedEnvironments, *, renderer: Renderer
) -> list[TrainingSample]:
    """Return `demonstrated` of each problem, for code that cannot await."""

    async def all_of_them() -> list[TrainingSample]:
        return [await demonstrated(problem, environments, renderer=renderer) for problem in problems]

    return run_now(all_of_them())


def _prompt_ids(
    problem: Problem, turns: Sequence[Turn], messages: Sequence[Message], *, renderer: Renderer
) -> np.ndarray:
    """Return [N] int32: the messages that follow these turns."""
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
