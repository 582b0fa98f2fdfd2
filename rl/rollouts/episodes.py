"""Episodes: a model and an environment in turn, as tokens that are only ever added to.

    opening -> prompt -> completion -> reply -> step -> messages -> further prompt -> completion -> ...

What the model produced stays as the engine gave it, and the next turn's prompt goes on from it; only what the
environment says is tokenized. So the tokens that are trained on are those that were drawn.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rl.clock import BusyClock, now_s
from rl.errors import RunError
from rl.protocols import Environment, Sampler
from rl.rollouts.environment_checks import checked_observation, common_opening, made_environment
from rl.rollouts.environment_limit import TooLongError
from rl.rollouts.environment_thread import EnvironmentCalls, EnvironmentThreads
from rl.rollouts.renderer import Renderer, render_prompt
from rl.rollouts.settings import EpisodeLimits
from rl.types import (
    Completion,
    EndReason,
    Message,
    Observation,
    Problem,
    Prompt,
    Reply,
    Rollout,
    SamplingParams,
    Turn,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, slots=True)
class Episodes:
    """Runs episodes, many at once; each has an environment of its own."""

    sampler: Sampler
    renderer: Renderer
    environment: Callable[[Problem], Environment]
    limits: EpisodeLimits
    max_tokens: int
    """Of one sequence, that generator and trainer can take."""
    threads: EnvironmentThreads = field(default_factory=EnvironmentThreads)
    """In which environments are called."""
    generating: BusyClock = field(default_factory=BusyClock)
    num_generated_tokens: int = 0

    async def run(
        self, problems: Sequence[Problem], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Rollout]]:
        """[P][G] rollouts, G being `sampling.num_samples`.

        All first turns are one call of the sampler, every later turn is a call of its own, all of one
        session. With a seed the result depends on it, the problems and the weights alone.

        Raises:
            ValueError: a prompt leaves no room for a reply; it names the problem.
            RunError: an environment cannot be made or does not open, which names the problem; or too many
                blocked.
        """
        self.threads.check()
        environments: list[list[EnvironmentCalls]] = []
        try:
            for problem in problems:
                environments.append([])
                for _ in range(sampling.num_samples):
                    environment = made_environment(self.environment, problem)
                    environments[-1].append(self.threads.calls_of(environment, problem))
            openings = [
                common_opening([calls.environment for calls in group], problem)
                for group, problem in zip(environments, problems, strict=True)
            ]
            room = self.limit - sampling.max_tokens
            prompts = [
                render_prompt(problem, messages, renderer=self.renderer, max_tokens=room)
                for problem, messages in zip(problems, openings, strict=True)
            ]
            firsts = await self.draw([p.token_ids for p in prompts], sampling, session)
            episodes = [
                Episode(
                    runner=self, environment=environment, prompt=prompt, sample=i,
                    sampling=sampling, session=session,
                ).run(messages, completion)
                for group, prompt, messages, completions in zip(
                    environments, prompts, openings, firsts, strict=True
                )
                for i, (environment, completion) in enumerate(zip(group, completions, strict=True))
            ]  # fmt: skip
            rollouts = iter(await _all_or_none(episodes))
            return [[next(rollouts) for _ in group] for group in environments]
        finally:
            await _close([e for group in environments for e in group], timeout_s=self.limits.step_timeout_s)

    @property
    def limit(self) -> int:
        """Most tokens of an episode."""
        limit = self.limits.max_tokens
        return self.max_tokens if limit is None else min(limit, self.max_tokens)

    async def draw(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, session: str | None
    ) -> list[list[Completion]]:
        """Completions, timed and counted."""
        with self.generating.active():
            groups = await self.sampler.generate(prompts, sampling=sampling, session=session)
        self.num_generated_tokens += sum(len(c.token_ids) for group in groups for c in group)
        return groups


@dataclass(kw_only=True, slots=True)
class Episode:
    """One of them."""

    runner: Episodes
    environment: EnvironmentCalls
    prompt: Prompt
    sample: int
    sampling: SamplingParams
    session: str | None
    turns: list[Turn] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    """All until now, in parts."""

    async def run(self, messages: Sequence[Message], completion: Completion) -> Rollout:
        """From the first completion to the end."""
        started, limits = now_s(), self.runner.limits
        prompt_ids = self.prompt.token_ids
        while True:
            self.tokens += [prompt_ids, completion.token_ids]
            text = self.runner.renderer.text(completion.token_ids)
            observation, failure = await self._step(Reply(text=text, completion=completion))
            self.turns.append(
                Turn(
                    messages=tuple(messages),
                    prompt_ids=prompt_ids,
                    completion=completion,
                    text=text,
                    observation=observation,
                )
            )
            if failure is not None:
                return self._rollout("failed", failure)
            messages = observation.messages
            if not messages:
                return self._rollout("done")
            if len(self.turns) >= limits.max_turns:
                return self._rollout("turns")
            if now_s() - started > limits.timeout_s:
                return self._rollout("time")
            try:
                prompt_ids = self.runner.renderer.continuation(messages, after=completion)
            except Exception as error:  # noqa: BLE001  (of a template or tokenizer, about these messages)
                what = f"the renderer refused the environment's messages ({error!r})"
                return self._rollout("failed", self._failure(what, len(self.turns), text, error))
            room = self.runner.limit - sum(map(len, self.tokens)) - len(prompt_ids)
            if room < 1:
                return self._rollout("tokens")
            completion = await self._reply(prompt_ids, room=room)

    async def _step(self, reply: Reply) -> tuple[Observation, str | None]:
        """What the environment answers, and why it could not."""
        turn = len(self.turns) + 1
        try:
            answer = await self.environment.step(
                reply, turn=turn, timeout_s=self.runner.limits.step_timeout_s
            )
            return checked_observation(answer), None
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001  (of the environment's own code)
            what = str(error) if isinstance(error, TooLongError) else f"raised {error!r}"
            return Observation(), self._failure(f"the environment {what}", turn, reply.text, error)

    def _failure(self, what: str, turn: int, text: str, error: Exception) -> str:
        """Logged, and returned."""
        failure = f"{what} in turn {turn} of problem {self.prompt.problem.id!r}, reply {text!r}"
        logger.warning("%s", failure, exc_info=error)
        return failure

    async def _reply(self, prompt_ids: np.ndarray, *, room: int) -> Completion:
        sampling = replace(
            self.sampling,
            num_samples=1,
            max_tokens=min(self.sampling.max_tokens, room),
            seed=None if self.sampling.seed is None else self._seed(self.sampling.seed),
        )
        tokens = np.concatenate([*self.tokens, prompt_ids])
        ((completion,),) = await self.runner.draw([tokens], sampling, self.session)
        return completion

    def _seed(self, of_call: int) -> int:
        """Of this turn: episodes that have gone alike until now go on apart, and so do those of other
        problems that an evaluation asks for with the same seed."""
        key = f"{of_call} problem {self.prompt.problem.id} sample {self.sample} turn {len(self.turns)}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2

    def _rollout(self, end: EndReason, failure: str | None = None) -> Rollout:
        return Rollout(
            prompt=self.prompt, sample=self.sample, turns=tuple(self.turns), end=end, failure=failure
        )


async def _all_or_none(episodes: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Results in order; after an error, or a cancellation, none goes on."""
    tasks = [asyncio.ensure_future(episode) for episode in episodes]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(environments: Iterable[EnvironmentCalls], *, timeout_s: float) -> None:
    """All of them, whatever one of them raises or how long it takes; that is logged."""
    closing = (calls.close(timeout_s=timeout_s) for calls in environments)
    for error in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(error, Exception):
            logger.warning("an environment could not be closed: %r", error, exc_info=error)
