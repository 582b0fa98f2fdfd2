"""From rollouts and demonstrations to what the trainer takes.

Shape legend: T tokens of a sequence, N of what the model is told, C of what it produced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.types import Completion, Rollout, TrainingSample


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a demonstrated conversation."""

    token_ids: np.ndarray
    """[N] or [C] int32."""
    is_reply: bool


def policy_sample(rollout: Rollout, *, advantages_C: np.ndarray, temperature: float) -> TrainingSample:
    """The rollout's tokens; those that the model produced are trained on, and no others.

    Args:
        advantages_C: of all tokens that the model produced, turn after turn.

    Raises:
        ValueError: these are not as many.
    """
    if len(advantages_C) != rollout.num_completion_tokens:
        raise ValueError(
            f"advantages_C has {len(advantages_C)} entries for the {rollout.num_completion_tokens} tokens "
            f"that the model produced for problem {rollout.prompt.problem.id!r}"
        )
    ends = np.cumsum([len(turn.completion.token_ids) for turn in rollout.turns])
    advantages = np.split(advantages_C, ends[:-1])

    def joined(of_turn: Callable[[int, Completion], np.ndarray], *, told: float) -> np.ndarray:
        """[T]: `told` where the model did not speak."""
        parts = []
        for i, turn in enumerate(rollout.turns):
            said_C = of_turn(i, turn.completion)
            parts += [np.full(len(turn.prompt_ids), told, dtype=said_C.dtype), said_C]
        return np.concatenate(parts)

    return TrainingSample(
        token_ids=np.concatenate(
            [ids for t in rollout.turns for ids in (t.prompt_ids, t.completion.token_ids)]
        ).astype(np.int32),
        mask=joined(lambda i, c: np.ones(len(c.token_ids), dtype=bool), told=False),
        generator_logprobs=joined(lambda i, c: c.logprobs.astype(np.float32), told=np.nan),
        advantages=joined(lambda i, c: advantages[i].astype(np.float32), told=0.0),
        policy_versions=joined(lambda i, c: c.policy_versions.astype(np.int32), told=-1),
        temperature=temperature,
    )


def supervised_sample(spans: Sequence[TokenSpan]) -> TrainingSample:
    """Demonstrated replies for a supervised loss: no generator, advantage one."""
    mask = np.concatenate([np.full(len(span.token_ids), span.is_reply) for span in spans])
    mask[0] = False  # nothing comes before it
    num_tokens = len(mask)
    return TrainingSample(
        token_ids=np.concatenate([span.token_ids for span in spans]).astype(np.int32),
        mask=mask,
        generator_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.ones(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def demonstration_sample(prompt_T: np.ndarray, completion_C: np.ndarray) -> TrainingSample:
    """A demonstration of one turn."""
    return supervised_sample([TokenSpan(prompt_T, is_reply=False), TokenSpan(completion_C, is_reply=True)])


def cut(sample: TrainingSample, *, max_tokens: int) -> TrainingSample:
    """Its first tokens."""
    arrays: dict[str, Any] = {
        name: value[:max_tokens]
        for name in TrainingSample.__slots__
        if isinstance(value := getattr(sample, name), np.ndarray)
    }
    return replace(sample, **arrays)
