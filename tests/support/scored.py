"""Rollouts for reward functions, without a tokenizer or a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl.types import Message, Observation, Problem, Prompt, Rollout, Turn
from tests.support.fakes import completion, completion_of, rollout_of

NO_TOKENS = np.zeros(0, dtype=np.int32)
COMPLETION = completion_of([1, 0])


def replied(
    *texts: str,
    sample: int = 0,
    question: str = "47 82",
    answer: str = "21",
    rewards: Sequence[float] = (),
    failure: str | None = None,
) -> Rollout:
    """Return an episode with one turn for each reply and the environment's `rewards` by turn."""
    problem = Problem(id="sum-digits/47-82", question=question, answer=answer)
    given = [*rewards, *[0.0] * (len(texts) - len(rewards))]
    turns = tuple(
        Turn(
            messages=(Message(role="user", content=question if i == 0 else f"and {i}?"),),
            prompt_ids=NO_TOKENS,
            completion=COMPLETION,
            text=text,
            observation=Observation(reward=given[i]),
        )
        for i, text in enumerate(texts)
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
    rollout = rollout_of(
        Prompt(problem=problem, token_ids=NO_TOKENS), completion(text, finish_reason=finish_reason), text=text
    )
    turn = replace(rollout.turns[0], observation=observation or Observation())
    return replace(rollout, turns=(turn,))
