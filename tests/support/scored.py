"""Rollouts to be scored, made without a tokenizer or a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.types import Completion, Message, Observation, Problem, Prompt, Rollout, Turn

NO_TOKENS = np.zeros(0, dtype=np.int32)
COMPLETION = Completion(
    token_ids=np.array([1, 0], dtype=np.int32),
    logprobs=np.array([-1.0, -1.0], dtype=np.float32),
    policy_versions=np.array([0, 0], dtype=np.int32),
    finish_reason="stop",
)


def replied(
    *texts: str,
    sample: int = 0,
    question: str = "47 82",
    answer: str = "21",
    rewards: Sequence[float] = (),
    failure: str | None = None,
) -> Rollout:
    """An episode with these replies, a turn each; `rewards` are the environment's, turn by turn."""
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
