"""Training samples from rollouts and from demonstrations.

Shape legend: T tokens of a sequence, N tokens of a prompt, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.branches import split_rows
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
    """Return the only row of a rollout; its model's tokens are trained on, with their advantages.

    Raises ValueError as `policy_samples`, and for a rollout of several rows or none.
    """
    samples = policy_samples([rollout], [advantages_C], temperature=temperature)
    if len(samples) != 1:
        raise ValueError(
            f"a rollout of problem {describe_value(rollout.prompt.problem.id)} has {len(samples)} "
            "rows to train on: must have 1; policy_samples returns the rows of any rollout"
        )
    return samples[0]


def policy_samples(
    rollouts: Sequence[Rollout],
    advantages_NC: Sequence[np.ndarray],
    *,
    temperature: float,
    first_episode: int = 0,
) -> list[TrainingSample]:
    """Return the rows of all rollouts, in order, whose arrays are parts of large ones.

    A linear rollout has one row. Each row has the tokens of a whole branch (`split_rows`) and
    trains those of the model that no earlier row of the rollout trains.

    Args:
        advantages_NC: advantages of each rollout's `trained_turns`.
        first_episode: number of the first rollout as an episode, for several calls whose samples
            are trained on together.

    Raises:
        ValueError: a rollout has more or fewer advantages, logprobs or versions than tokens of the
            model.
    """
    _check_lengths(rollouts, advantages_NC)
    # One array of each kind for all rollouts: a batch has thousands of them, and numpy takes longer
    # to begin a call than to fill a short array.
    parts = _RowParts()
    for number, (rollout, advantages_C) in enumerate(zip(rollouts, advantages_NC, strict=True)):
        parts.add(rollout, advantages_C, episode=first_episode + number)
    if not parts.ids:
        return []

    lengths = [*map(len, parts.ids)]
    # Prompts and completions alternate.
    is_sampled_T = np.repeat(np.tile([False, True], len(parts.logprobs)), lengths)
    mask = np.repeat(parts.is_trained, lengths)
    token_ids = np.concatenate(parts.ids).astype(np.int32, copy=False)
    logprobs = _spread(parts.logprobs, np.float32, is_sampled_T, elsewhere=np.nan)
    advantages = _spread(parts.advantages, np.float32, mask, elsewhere=0.0)
    versions = _spread(parts.versions, np.int32, is_sampled_T, elsewhere=-1)
    samples = []
    begin = 0
    for num, episode in zip(parts.num_tokens, parts.episodes, strict=True):
        row = slice(begin, begin + num)
        begin = row.stop
        samples.append(
            TrainingSample(
                token_ids=token_ids[row],
                mask=mask[row],
                generator_logprobs=logprobs[row],
                advantages=advantages[row],
                policy_versions=versions[row],
                temperature=temperature,
                episode=episode,
            )
        )
    return samples


@dataclass(slots=True)
class _RowParts:
    """Arrays of all turns of all rows: one for each prompt and each completion, in order."""

    ids: list[np.ndarray] = field(default_factory=list)
    """Token ids of a prompt, of its completion, of the next prompt, and so on."""
    is_trained: list[bool] = field(default_factory=list)
    """True for the parts of `ids` that the row trains."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    advantages: list[np.ndarray] = field(default_factory=list)
    """Advantages of the trained parts alone."""
    num_tokens: list[int] = field(default_factory=list)
    """Tokens of each row."""
    episodes: list[int | None] = field(default_factory=list)
    """Number of each row's episode; None for the only row of an episode."""

    def add(self, rollout: Rollout, advantages_C: np.ndarray, *, episode: int) -> None:
        """Append the rows of a rollout."""
        rows = split_rows(rollout.branches)
        is_alone = len(rows) == 1
        if is_alone:
            # It trains all that is trained. Most rollouts are linear, so this way is short.
            self.advantages.append(advantages_C)
        places = {} if is_alone else find_places(rollout)
        for row in rows:
            num_before = len(self.ids)
            for i, is_new in zip(row.turns, row.is_new, strict=True):
                turn = rollout.turns[i]
                self.ids += [turn.prompt_ids, turn.completion.token_ids]
                self.is_trained += [False, is_new]
                self.logprobs.append(turn.completion.logprobs)
                self.versions.append(turn.completion.policy_versions)
                if is_new and not is_alone:
                    self.advantages.append(advantages_C[places[i]])
            self.num_tokens.append(sum(map(len, self.ids[num_before:])))
            self.episodes.append(None if is_alone else episode)


def find_places(rollout: Rollout) -> dict[int, slice]:
    """Return the place of each trained turn's completion among the rollout's [C] tokens."""
    places: dict[int, slice] = {}
    begin = 0
    for i in rollout.trained_indices:
        places[i] = slice(begin, begin + len(rollout.turns[i].completion.token_ids))
        begin = places[i].stop
    return places


def collect_from_rows(
    rollout: Rollout, rows: Sequence[np.ndarray | None], *, dtype: type, missing: float
) -> np.ndarray:
    """Return values of the rollout's [C] trained tokens from the values of its rows' tokens.

    Args:
        rows: [T] values of each row, in the order of `split_rows`; fewer of a row that was cut,
            None for a row that was left out.
        missing: value of tokens that no row has.
    """
    places = find_places(rollout)
    values_C: np.ndarray = np.full(rollout.num_completion_tokens, missing, dtype=dtype)
    for row, values_T in zip(split_rows(rollout.branches), rows, strict=True):
        end = 0
        for i, is_new in zip(row.turns, row.is_new, strict=True):
            turn = rollout.turns[i]
            begin = end + len(turn.prompt_ids)
            end = begin + len(turn.completion.token_ids)
            if is_new and values_T is not None:
                values = values_T[begin:end]
                values_C[places[i]][: len(values)] = values
    return values_C


def _spread(
    values: Sequence[np.ndarray], dtype: type, where_T: np.ndarray, *, elsewhere: float
) -> np.ndarray:
    """Return [T]: the values one after another where `where_T` is True, and `elsewhere`."""
    spread_T: np.ndarray = np.full(len(where_T), elsewhere, dtype=dtype)
    spread_T[where_T] = np.concatenate(values)
    return spread_T


def _check_lengths(rollouts: Sequence[Rollout], advantages_NC: Sequence[np.ndarray]) -> None:
    """Raise ValueError for the first rollout with more or fewer values than tokens of the model."""
    for rollout, advantages_C in zip(rollouts, advantages_NC, strict=True):
        problem, num = rollout.prompt.problem, 0
        for turn in rollout.trained_turns:
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
