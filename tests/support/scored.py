"""Rollouts for reward functions, without a tokenizer or a model."""

from __future__ import annotations

import numpy as np

from rl.types import Message, Observation, Problem, Prompt, Rollout, Turn
from tests.support.fakes import completion, completion_of

NO_TOKENS = np.zeros(0, dtype=np.int32)
COMPLETION = completion_of([1, 0])


def replied(
    *texts: str,
    sample: int = 0,
    question: str = "47 82",
    answer: str = "21",
    failure: str | None = None,
) -> Rollout:
    """Return an episode with one turn for each reply."""
    problem = Problem(id="sum-digits/47-82", question=question, answer=answer)
    asked = [question, *(f"and {i}?" for i in range(1, len(texts)))]
    turns = tuple(
        Turn(
            messages=(Message(role="user", content=content),),
            prompt_ids=NO_TOKENS,
            completion=COMPLETION,
            text=text,
        )
        for content, text in zip(asked, texts, strict=True)
    )
    prompt = Prompt(problem=problem, token_ids=NO_TOKENS)
    return Rollout(prompt=prompt, sample=sample, turns=turns, failure=failure)


def reply(
    problem: Problem,
    text: str,
    *,
    finish_reason: str = "stop",
    observation: Observation | None = None,
) -> Rollout:
    """Return the rollout of one reply to a problem."""
    turn = Turn(
        messages=(),
        prompt_ids=NO_TOKENS,
        completion=completion(text, finish_reason=finish_reason),
        text=text,
        observation=observation or Observation(),
    )
    return Rollout(prompt=Prompt(problem=problem, token_ids=NO_TOKENS), sample=0, turns=(turn,))
