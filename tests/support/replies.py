"""Rollouts of one turn, without a model."""

from __future__ import annotations

import numpy as np

from rl.types import Message, Observation, Problem, Prompt, Rollout, Turn
from tests.support.fakes import completion


def reply(
    problem: Problem, text: str, *, finish_reason: str = "stop", observation: Observation | None = None
) -> Rollout:
    """A reply of this text to the problem, and what the environment said to it."""
    token_ids = np.frombuffer(problem.question.encode(), dtype=np.uint8).astype(np.int32)
    turn = Turn(
        messages=(Message(role="user", content=problem.question),),
        prompt_ids=token_ids,
        completion=completion(text, finish_reason=finish_reason),
        text=text,
        observation=observation or Observation(),
    )
    return Rollout(prompt=Prompt(problem=problem, token_ids=token_ids), sample=0, turns=(turn,))
