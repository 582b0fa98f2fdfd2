"""Rollouts of agents, in place of episodes with an environment of relay's own."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Protocol, runtime_checkable

import numpy as np

from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode
from rl.protocols import TokenGenerator
from rl.rollouts.episode import EpisodeLimits
from rl.rollouts.renderer import Renderer
from rl.types import (
    Completion,
    Observation,
    Problem,
    Prompt,
    Rollout,
    SamplingParams,
    Turn,
)
from rl.utils.clock import BusyClock
from rl.utils.printing import describe_value
from rl.utils.threads import gather_or_cancel
from rl.utils.user_code import describe_user_error

logger = logging.getLogger(__name__)

ChooseBranches = Callable[[Rollout], Iterable[int]]
"""Function of a rollout that returns the indices of its branches to train on."""
UNLIMITED = 2**31
"""Tokens of all turns of an episode without a limit on them."""


class AgentPlayer(Protocol):
    """Plays agents whose requests a generator answers."""

    async def play(
        self,
        problem: Problem,
        *,
        settings: EpisodeSettings,
        time_limit_s: float,
        generator: TokenGenerator,
    ) -> PlayedEpisode:
        """Play one episode, whose requests `generator` answers.

        An agent that fails gives an episode with its failure.
        """
        ...


@runtime_checkable
class PlayedTask(Protocol):
    """A task that brings the player of its episodes, such as agents in the controller's process."""

    def open_player(self, *, renderer: Renderer) -> AbstractAsyncContextManager[AgentPlayer]:
        """Start what plays the episodes, and end it with the block."""
        ...


@dataclass(kw_only=True, slots=True)
class AgentEpisodes:
    """Plays many agents at once; used as `rl.rollouts.episode.Episodes` is."""

    generator: TokenGenerator
    player: AgentPlayer
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    max_tokens: int
    """Longest conversation that generator and trainer can take."""
    choose: ChooseBranches | None = None
    """Foreign choice of the branches that are trained on; None: the player's."""
    generating: BusyClock = field(default_factory=BusyClock)
    num_generated_tokens: int = 0

    async def run(
        self, problems: Sequence[Problem], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Rollout]]:
        """Return [P][G] rollouts, where G is `sampling.num_samples`.

        With a seed the result depends only on it, the problems, the weights and the agents.
        """
        episodes = []
        for problem in problems:
            for sample in range(sampling.num_samples):
                episodes.append(self._play(problem, sample, sampling=sampling))
        rollouts = iter(await gather_or_cancel(episodes))
        return [list(islice(rollouts, sampling.num_samples)) for _ in problems]

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """Return completions of the generator, and count their time and tokens."""
        with self.generating.measure():
            groups = await self.generator.generate(prompts, sampling=sampling, session=session)
        for completion in chain.from_iterable(groups):
            self.num_generated_tokens += len(completion.token_ids)
        return groups

    async def _play(self, problem: Problem, sample: int, *, sampling: SamplingParams) -> Rollout:
        seed = _derive_seed(sampling.seed, problem, sample)
        limits = self.limits
        settings = EpisodeSettings(
            sampling=replace(sampling, num_samples=1, seed=seed),
            max_context=self.max_tokens,
            max_requests=limits.max_turns,
            max_tokens=limits.max_tokens or UNLIMITED,
        )
        played = await self.player.play(
            problem, settings=settings, time_limit_s=limits.timeout_s, generator=self
        )
        if played.failure is not None:
            logger.warning("problem %s: %s", describe_value(problem.id), played.failure)
        rollout = make_rollout(problem, sample, played)
        return rollout if self.choose is None else choose_branches(rollout, self.choose)


def make_rollout(problem: Problem, sample: int, played: PlayedEpisode) -> Rollout:
    """Return an agent's episode as a rollout; its metrics are those of the last turn."""
    turns = [*played.turns] or [_make_empty_turn()]
    turns[-1] = replace(turns[-1], observation=Observation(metrics=played.metrics))
    return Rollout(
        prompt=Prompt(problem=problem, token_ids=turns[0].prompt_ids),
        sample=sample,
        turns=tuple(turns),
        branches=played.branches,
        end=played.end,
        failure=played.failure,
        state=played.state,
    )


def choose_branches(rollout: Rollout, choose: ChooseBranches) -> Rollout:
    """Return the rollout with the branches trained that a foreign function chooses.

    Where that fails, the rollout has failed.
    """
    if rollout.failure is not None:
        return rollout
    num = len(rollout.branches)
    try:
        chosen = [operator.index(i) for i in choose(rollout)]
    except Exception as error:  # noqa: BLE001  (foreign code)
        failure = f"task.choose_branches failed: {describe_user_error(error)}"
        return replace(rollout, end="failed", failure=failure)
    wrong = [i for i in chosen if not 0 <= i < num]
    if wrong:
        return replace(
            rollout,
            end="failed",
            failure=f"task.choose_branches returned {describe_value(chosen)}: {wrong[0]} must be "
            f"an index of its {num} branches, from 0 to {num - 1}",
        )
    branches = [
        replace(branch, is_trained=i in chosen) for i, branch in enumerate(rollout.branches)
    ]
    return replace(rollout, branches=tuple(branches))


def _make_empty_turn() -> Turn:
    """Return the turn of an agent that has asked nothing, which is a failed rollout."""
    completion = Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        policy_versions=np.empty(0, np.int32),
        finish_reason="abort",
    )
    return Turn(messages=(), prompt_ids=np.empty(0, np.int32), completion=completion, text="")


def _derive_seed(seed: int | None, problem: Problem, sample: int) -> int | None:
    if seed is None:
        return None
    key = f"{seed} problem {problem.id} agent {sample}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
