"""Training samples from rollouts and from demonstrations.

Shape legend: T tokens of a sequence, N tokens of a prompt, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.rollouts.environment import Environments
from rl.rollouts.episode import EpisodeLimits, Episodes
from rl.rollouts.renderer import Renderer
from rl.types import Completion, Problem, Rollout, SamplingParams, TrainingSample
from rl.utils.errors import RunError
from rl.utils.excerpts import shown
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
    """Return the rollout's tokens with a mask over those that the model produced, each with its advantage.

    Raises ValueError if there are more or fewer advantages.
    """
    if len(advantages_C) != rollout.num_completion_tokens:
        num = rollout.num_completion_tokens
        raise ValueError(
            f"{len(advantages_C)} advantages for {num} tokens of problem {shown(rollout.prompt.problem.id)}"
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


def demonstrated_completion(token_ids_C: np.ndarray) -> Completion:
    """Return a reply as a completion that no policy sampled: its logprobs are NaN, its versions -1."""
    return Completion(
        token_ids=token_ids_C,
        logprobs=np.full(len(token_ids_C), np.nan, dtype=np.float32),
        policy_versions=np.full(len(token_ids_C), -1, dtype=np.int32),
        finish_reason="stop",
    )


def cut(sample: TrainingSample, *, max_tokens: int) -> TrainingSample:
    """Return the first tokens of a sample."""
    arrays: dict[str, Any] = {
        name: value[:max_tokens]
        for name in TrainingSample.__slots__
        if isinstance(value := getattr(sample, name), np.ndarray)
    }
    return replace(sample, **arrays)


async def demonstrated(problem: Problem, environments: Environments, *, renderer: Renderer) -> TrainingSample:
    """Return the conversation of `demonstrated_rollout` as a sample with advantage one; raises as that does."""
    rollout = await demonstrated_rollout(problem, environments, renderer=renderer)
    return policy_sample(rollout, advantages_C=np.ones(rollout.num_completion_tokens), temperature=1.0)


async def demonstrated_rollout(
    problem: Problem, environments: Environments, *, renderer: Renderer
) -> Rollout:
    """Play an episode whose replies are the problem's demonstration, and return the rollout.

    Raises:
        UnfitDemonstrationError: there is no demonstration, or it has too many or too few replies.
        ValueError: the environment breaks, or the renderer refuses its messages.
    """
    replies = problem.demonstrations
    if not replies:
        raise UnfitDemonstrationError(f"problem {shown(problem.id)} has no demonstration to warm up on")
    episodes = Episodes(
        generator=_Recital(replies, renderer=renderer),
        renderer=renderer,
        environments=environments,
        limits=EpisodeLimits(max_turns=len(replies)),
        max_tokens=2**31,
    )
    try:
        ((rollout,),) = await episodes.run([problem], sampling=SamplingParams(max_tokens=1))
    except RunError as error:
        raise ValueError(f"the demonstration of problem {shown(problem.id)}: {error}") from error
    if rollout.failure is not None:
        raise ValueError(rollout.failure)
    num_turns = len(rollout.turns)
    if rollout.end != "done" or num_turns < len(replies):
        what = "ends" if rollout.end == "done" else "continues"
        raise UnfitDemonstrationError(
            f"problem {shown(problem.id)}: its environment {what} after reply {num_turns} of the {len(replies)} "
            "demonstrated"
        )
    return rollout


def demonstrated_now(
    problems: Iterable[Problem], environments: Environments, *, renderer: Renderer
) -> list[TrainingSample]:
    """Return `demonstrated` of each problem, for code that cannot await."""
    return [run_now(demonstrated(problem, environments, renderer=renderer)) for problem in problems]


class _Recital:
    """Generator that gives the replies of a demonstration one after another."""

    def __init__(self, replies: Iterable[str], *, renderer: Renderer) -> None:
        self._replies = iter(replies)
        self._renderer = renderer

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        token_ids = self._renderer.reply(next(self._replies), prompt_ids=prompts[0])
        return [[demonstrated_completion(token_ids)]]
