"""From messages to a prompt that fits, and a demonstrated conversation as a training sample.

Shape legend: N tokens of what a model is told, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rl.protocols import Environment
from rl.rollouts.samples import TokenSpan, supervised_sample
from rl.types import Completion, Message, Problem, Prompt, Reply, TrainingSample


class Renderer(Protocol):
    """Messages to tokens, and tokens to text."""

    stop_token_ids: tuple[int, ...]
    """A reply ends after one of these."""

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """[N] int32, up to where the model's first reply begins."""
        ...

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """[N] int32, all between the last token of `after` and where the model's next reply begins."""
        ...

    def reply(self, text: str) -> np.ndarray:
        """[C] int32, as the model should have said it, end of turn included."""
        ...

    def text(self, token_ids: np.ndarray) -> str:
        """Decoded, special tokens removed."""
        ...


def render_prompt(
    problem: Problem, messages: Sequence[Message], *, renderer: Renderer, max_tokens: int
) -> Prompt:
    """Raises ValueError for a prompt that leaves no room in the context."""
    token_ids = renderer.opening(messages)
    if len(token_ids) > max_tokens:
        raise ValueError(
            f"the prompt of problem {problem.id!r} has {len(token_ids)} tokens; the context leaves room "
            f"for {max_tokens} (generator.max_model_len less sampling.max_tokens)"
        )
    return Prompt(problem=problem, token_ids=token_ids)


async def demonstrated(problem: Problem, environment: Environment, *, renderer: Renderer) -> TrainingSample:
    """The conversation in which each reply is the demonstrated one, as a rollout would have it; the replies
    are trained on.

    Raises:
        ValueError: there is no demonstration, or it has more or fewer replies than the environment asks for.
    """
    replies = problem.demonstrations
    if not replies:
        raise ValueError(f"problem {problem.id!r} has no demonstration to warm up on")
    spans: list[TokenSpan] = []
    try:
        told = renderer.opening(environment.opening())
        for turn, text in enumerate(replies, start=1):
            reply = renderer.reply(text)
            spans += [TokenSpan(told, is_reply=False), TokenSpan(reply, is_reply=True)]
            completion = _as_completion(reply)
            observation = await environment.step(Reply(text=text, completion=completion))
            if bool(observation.messages) != (turn < len(replies)):
                more = "goes on after" if observation.messages else "ends before"
                raise ValueError(
                    f"problem {problem.id!r}: its environment {more} reply {turn} of the {len(replies)} of "
                    "its demonstration: must be a reply for each turn"
                )
            if observation.messages:
                told = renderer.continuation(observation.messages, after=completion)
    finally:
        await environment.close()
    return supervised_sample(spans)


def _as_completion(reply: np.ndarray) -> Completion:
    return Completion(
        token_ids=reply,
        logprobs=np.full(len(reply), np.nan, dtype=np.float32),
        policy_versions=np.full(len(reply), -1, dtype=np.int32),
        finish_reason="stop",
    )
