"""An episode of verifiers as relay's `Environment`, and the rewards that it came with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rl.rollouts.rubric import UnparsedAnswer
from rl.types import Message, Observation, Reply, Rollout

REWARD = "verifiers/reward"
START_S = 180.0
"""Within this the shared tool servers of an environment must be up; the first replies wait for them."""


class EpisodeHost(Protocol):
    def start(self) -> None: ...

    def submit(self, coroutine: Any) -> Any: ...


class RunningEpisode(Protocol):
    async def reply(self, reply: Reply) -> Observation: ...

    async def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class VerifiersEnvironment:
    """Starts the episode of verifiers at the first reply, and passes replies and messages on."""

    runs_inline: ClassVar[bool] = True
    """It has a thread of its own for code that may block."""

    host: EpisodeHost
    make_episode: Callable[[], RunningEpisode]
    messages: Sequence[Message]
    """What the model is told first."""
    _episode: RunningEpisode | None = field(default=None, init=False)

    def opening(self) -> Sequence[Message]:
        return self.messages

    async def step(self, reply: Reply) -> Observation:
        """Raises EpisodeError where the rollout failed, or does what relay cannot follow."""
        if self._episode is None:
            await asyncio.to_thread(self.host.start)
            self._episode = self.make_episode()
        return await asyncio.wrap_future(self.host.submit(self._episode.reply(reply)))

    async def close(self) -> None:
        if self._episode is not None:
            await asyncio.wrap_future(self.host.submit(self._episode.close()))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeReward:
    """What the environment's own rewards add up to."""

    unscored_value: float = 0.0

    def __call__(self, rollout: Rollout) -> float:
        """Raises UnparsedAnswer for an episode that a limit of the run ended: it was never scored."""
        reward = rollout.turns[-1].observation.metrics.get(REWARD)
        if reward is None:
            raise UnparsedAnswer(
                f"the episode was not scored: it ended because of its {rollout.end}",
                value=self.unscored_value,
            )
        return reward


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSolved:
    """Whether the sum of the rewards is that of a right answer."""

    solved_at: float

    def __call__(self, rollout: Rollout) -> bool:
        reward = rollout.turns[-1].observation.metrics.get(REWARD)
        return reward is not None and reward >= self.solved_at
