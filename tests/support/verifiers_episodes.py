"""Episodes of verifiers with scripted replies, for synchronous tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rl.agents.rollouts import AgentEpisodes
from rl.rollouts.episode import EpisodeLimits
from rl.tasks.verifiers_task import VerifiersTask
from rl.types import Problem, Rollout, SamplingParams
from tests.support.agent_endpoint import ScriptedGenerator, make_qwen_renderer


class PlayedEnvironment:
    """A task whose player is open, with a model that says what it is told to.

    Example:
        with closing(PlayedEnvironment(task)) as played:
            rollout = played.play(problem, "3", "4")
    """

    def __init__(self, task: VerifiersTask) -> None:
        self.task = task
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        opening = task.open_player(renderer=make_qwen_renderer())
        self.player = self.run(self._stack.enter_async_context(opening))

    def first(self) -> Problem:
        return next(self.task.train_problems(seed=0))

    def play(self, problem: Problem, *texts: str, **limits: Any) -> Rollout:
        """Return an episode in which the model says these texts, and then the last again."""
        left = list(texts)
        (rollout,) = self.play_all(
            [problem], lambda prompt: left.pop(0) if len(left) > 1 else left[0], **limits
        )
        return rollout

    def play_all(
        self,
        problems: Sequence[Problem],
        reply: Callable[[str], str],
        *,
        num_tokens: int = 20_000,
        **limits: Any,
    ) -> list[Rollout]:
        """Return an episode of each problem; `reply` answers the text of a prompt."""
        episodes = AgentEpisodes(
            generator=ScriptedGenerator(reply=reply),
            player=self.player,
            limits=EpisodeLimits(**limits),
            max_tokens=num_tokens,
        )
        sampling = SamplingParams(max_tokens=1000, num_samples=1)
        groups = self.run(episodes.run(problems, sampling=sampling))
        return [rollout for (rollout,) in groups]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.close()


def list_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of verifiers, without their prefix."""
    found = {}
    for name, value in rollout.turns[-1].observation.metrics.items():
        if name.startswith("verifiers/"):
            found[name.removeprefix("verifiers/")] = value
    return found
