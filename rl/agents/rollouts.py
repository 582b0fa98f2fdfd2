"""Rollouts of agents, in place of episodes with an environment of relay's own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
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

logger = logging.getLogger(__name__)

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
        return make_rollout(problem, sample, played)


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
