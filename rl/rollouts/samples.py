"""Training samples from rollouts and from demonstrations.

Shape legend: T tokens of a sequence, N tokens of a prompt, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.rollouts.environment import Environments
from rl.rollouts.episode import EpisodeLimits, Episodes
from rl.rollouts.renderer import Renderer
from rl.types import Completion, Problem, Rollout, SamplingParams, TrainingSample
from rl.utils.errors import RunError
from rl.utils.printing import describe_value
from rl.utils.threads import run_now


class UnfitDemonstrationError(ValueError):
    """A problem has no demonstration, or its number of replies does not fit the environment."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A part of a demonstrated conversation."""

    token_ids: np.ndarray
    """[N] or [C] int32."""
    is_reply: bool


def policy_sample(
    rollout: Rollout, *, advantages_C: np.ndarray, temperature: float
) -> TrainingSample:
    """Return the rollout's tokens; those of the model are trained on, with their advantages.

    Raises ValueError as `policy_samples`.
    """
    (sample,) = policy_samples([rollout], [advantages_C], temperature=temperature)
    return sample


def policy_samples(
    rollouts: Sequence[Rollout], advantages_NC: Sequence[np.ndarray], *, temperature: float
) -> list[TrainingSample]:
    """Return `policy_sample` of many rollouts at a time, whose arrays are parts of large ones.

    Raises ValueError if a rollout has more or fewer advantages, logprobs or versions than tokens of
    the model.
    """
    if not rollouts:
        return []
    _check_lengths(rollouts, advantages_NC)
    # One array of each kind for all rollouts: a batch has thousands of them, and numpy takes longer
    # to begin a call than to fill a short array.
    ids, logprobs_N, versions_N = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for rollout in rollouts:
        for turn in rollout.turns:
            ids += [turn.prompt_ids, turn.completion.token_ids]
            logprobs_N.append(turn.completion.logprobs)
            versions_N.append(turn.completion.policy_versions)
    # Prompts and completions alternate.
    mask = np.repeat(np.tile([False, True], len(logprobs_N)), [*map(len, ids)])

    def spread(values: Sequence[np.ndarray], dtype: type, *, prompt: float) -> np.ndarray:
        """Return the values of all generated tokens, and `prompt` at tokens of prompts."""
        spread_T: np.ndarray = np.full(len(mask), prompt, dtype=dtype)
        spread_T[mask] = np.concatenate(values)
        return spread_T

    token_ids = np.concatenate(ids).astype(np.int32, copy=False)
    logprobs = spread(logprobs_N, np.float32, prompt=np.nan)
    advantages = spread(advantages_NC, np.float32, prompt=0.0)
    versions = spread(versions_N, np.int32, prompt=-1)
    samples = []
    begin = 0
    for rollout in rollouts:
        rows = slice(begin, begin + rollout.num_tokens)
        begin = rows.stop
        samples.append(
            TrainingSample(
                token_ids=token_ids[rows],
                mask=mask[rows],
                generator_logprobs=logprobs[rows],
                advantages=advantages[rows],
                policy_versions=versions[rows],
                temperature=temperature,
            )
        )
    return samples


def _check_lengths(rollouts: Sequence[Rollout], advantages_NC: Sequence[np.ndarray]) -> None:
    """Raise ValueError for the first rollout with more or fewer values than tokens of the model."""
    for rollout, advantages_C in zip(rollouts, advantages_NC, strict=True):
        problem, num = rollout.prompt.problem, 0
        for turn in rollout.turns:
            c = turn.completion
            num += len(c.token_ids)
            if not len(c.token_ids) == len(c.logprobs) == len(c.policy_versions):
                raise ValueError(
                    f"a completion of problem {describe_value(problem.id)} has {len(c.token_ids)} "
                    f"tokens, {len(c.logprobs)} logprobs and {len(c.policy_versions)} policy "
                    "versions: must be equally many"
                )
        if len(advantages_C) != num:
            raise ValueError(
                f"{len(advantages_C)} advantages for {num} tokens of problem "
                f"{describe_value(problem.id)}"
            )


def make_supervised_sample(spans: Sequence[TokenSpan]) -> TrainingSample:
    """Return demonstrated replies as a sample for a supervised loss, with advantage one."""
    ids, masks = [], []
    for span in spans:
        ids.append(span.token_ids)
        masks.append(np.full(len(span.token_ids), span.is_reply))
    mask = np.concatenate(masks)
    mask[0] = False  # the first token is never a target
    num_tokens = len(mask)
    return TrainingSample(
        token_ids=np.concatenate(ids).astype(np.int32),
        mask=mask,
        generator_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.ones(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def make_demonstration_sample(prompt_T: np.ndarray, completion_C: np.ndarray) -> TrainingSample:
    """Return a demonstration of one turn as a sample."""
    return make_supervised_sample(
        [TokenSpan(prompt_T, is_reply=False), TokenSpan(completion_C, is_reply=True)]
    )


def make_demonstrated_completion(token_ids_C: np.ndarray) -> Completion:
    """Return a reply as a completion that no policy sampled: logprobs NaN, versions -1."""
    return Completion(
        token_ids=token_ids_C,
        logprobs=np.full(len(token_ids_C), np.nan, dtype=np.float32),
        policy_versions=np.full(len(token_ids_C), -1, dtype=np.int32),
        finish_reason="stop",
    )


def cut(sample: TrainingSample, *, max_tokens: int) -> TrainingSample:
    """Return the first tokens of a sample."""
    arrays: dict[str, Any] = {}
    for name in TrainingSample.__slots__:
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            arrays[name] = value[:max_tokens]
    return replace(sample, **arrays)


async def make_sample_of_demonstration(
    problem: Problem, environments: Environments, *, renderer: Renderer
) -> TrainingSample:
    """Return the conversation of `play_demonstration` as a sample with advantage one.

    Raises as that does.
    """
    rollout = await play_demonstration(problem, environments, renderer=renderer)
    return policy_sample(
        rollout, advantages_C=np.ones(rollout.num_completion_tokens), temperature=1.0
    )


async def play_demonstration(
    problem: Problem, environments: Environments, *, renderer: Renderer
) -> Rollout:
    """Play an episode whose replies are the problem's demonstration, and return the rollout.

    Raises:
        UnfitDemonstrationError: there is no demonstration, or it has too many or too few replies.
        ValueError: the environment breaks, or the renderer refuses its messages.
    """
    # An episode of the task itself, played by a generator that recites: so the conversation has the
    # environment's messages, and its tokens are those that a policy would see.
    replies = problem.demonstrations
    if not replies:
        raise UnfitDemonstrationError(
            f"problem {describe_value(problem.id)} has no demonstration to warm up on"
        )
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
        raise ValueError(
            f"the demonstration of problem {describe_value(problem.id)}: {error}"
        ) from error
    if rollout.failure is not None:
        raise ValueError(rollout.failure)
    # "done" means that the environment, not the limit of turns, ended the episode.
    num_turns = len(rollout.turns)
    if rollout.end != "done" or num_turns < len(replies):
        what = "ends" if rollout.end == "done" else "continues"
        raise UnfitDemonstrationError(
            f"problem {describe_value(problem.id)}: its environment {what} after reply {num_turns} "
            f"of the {len(replies)} demonstrated"
        )
    return rollout


def make_demonstration_samples_now(
    problems: Iterable[Problem], environments: Environments, *, renderer: Renderer
) -> list[TrainingSample]:
    """Return `make_sample_of_demonstration` of each problem, for code that cannot await."""
    return [
        run_now(make_sample_of_demonstration(problem, environments, renderer=renderer))
        for problem in problems
    ]


class _Recital:
    """Generator that gives the replies of a demonstration one after another."""

    def __init__(self, replies: Iterable[str], *, renderer: Renderer) -> None:
        self._replies = iter(replies)
        self._renderer = renderer

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        token_ids = self._renderer.reply(next(self._replies), prompt_ids=prompts[0])
        return [[make_demonstrated_completion(token_ids)]]
