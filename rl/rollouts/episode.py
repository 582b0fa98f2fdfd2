"""Episodes: a model and an environment take turns, as a token sequence that only grows.

    opening -> prompt -> completion -> reply -> step -> messages -> further prompt -> completion -> ...

The model's tokens stay exactly as the engine produced them; only the environment's messages are tokenized. So
training sees the tokens that were sampled.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rl.config.effect import check_refused, refused
from rl.config.tree import check_bounds
from rl.protocols import TokenGenerator
from rl.rollouts.environment import EnvironmentCalls, EnvironmentFailedError, Environments
from rl.rollouts.renderer import Renderer, render_prompt
from rl.types import (
    Completion,
    EndReason,
    Observation,
    Problem,
    Prompt,
    Reply,
    Rollout,
    SamplingParams,
    Turn,
)
from rl.utils.clock import BusyClock, now_s

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

WHOLE_DISTRIBUTION = refused("the trainer's logprobs are of the whole distribution")


@dataclass(kw_only=True, slots=True)
class Sampling:
    """Sampling of training completions."""

    max_tokens: int = 32
    """Most new tokens of one completion."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it, so that both use the same distribution."""
    top_p: float = field(default=1.0, metadata=WHOLE_DISTRIBUTION)
    """Refused: training needs tokens of the whole distribution."""
    top_k: int = field(default=0, metadata=WHOLE_DISTRIBUTION)
    """Refused: training needs tokens of the whole distribution."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_tokens", at_least=1)
        # Greedy tokens have no policy gradient; evaluation is greedy anyway.
        check_bounds(self, "temperature", at_least=0.01, below=math.inf)
        check_refused(self)


@dataclass(kw_only=True, slots=True)
class EpisodeLimits:
    """Limits at which an episode of several turns ends, whatever its environment says."""

    max_turns: int = 16
    """Most replies of the model."""
    max_tokens: int | None = None
    """Most tokens of all turns, prompts included; None: as many as the generator can take."""
    step_timeout_s: float = 60.0
    """Longest time an environment may take to answer a reply, or to close; then the rollout fails."""
    timeout_s: float = 600.0
    """Time after the first reply from which on no further turn begins."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_turns", at_least=1)
        check_bounds(self, "max_tokens", at_least=2)
        check_bounds(self, "step_timeout_s", "timeout_s", above=0, below=math.inf)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """Runs many episodes at once; each has an environment of its own."""

    generator: TokenGenerator
    renderer: Renderer
    environments: Environments
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    max_tokens: int
    """Longest sequence that generator and trainer can take."""
    generating: BusyClock = field(default_factory=BusyClock)
    num_generated_tokens: int = 0

    async def run(
        self, problems: Sequence[Problem], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Rollout]]:
        """Return [P][G] rollouts, where G is `sampling.num_samples`.

        All first turns are one call of the generator, every later turn is a call of its own, all of one
        session. With a seed the result depends only on it, the problems and the weights.

        Raises:
            ValueError: an environment cannot be made or opened, or a prompt leaves no room for a reply; names the
                problem.
        """
        async with self.environments.opened(problems, num=sampling.num_samples) as environments:
            room = self.limit - sampling.max_tokens
            prompts = [
                render_prompt(problem, group[0].messages, renderer=self.renderer, max_tokens=room)
                for problem, group in zip(problems, environments, strict=True)
            ]
            firsts = await self.draw([p.token_ids for p in prompts], sampling, session)
            episodes = [
                Episode(
                    runner=self, environment=environment, prompt=prompt, sample=i,
                    sampling=sampling, session=session,
                ).run(completion)
                for group, prompt, completions in zip(environments, prompts, firsts, strict=True)
                for i, (environment, completion) in enumerate(zip(group, completions, strict=True))
            ]  # fmt: skip
            rollouts = iter(await all_or_none(episodes))
            return [[next(rollouts) for _ in group] for group in environments]

    @property
    def limit(self) -> int:
        """Most tokens of an episode."""
        limit = self.limits.max_tokens
        return self.max_tokens if limit is None else min(limit, self.max_tokens)

    async def draw(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, session: str | None
    ) -> list[list[Completion]]:
        """Return completions of the generator, and count their time and tokens."""
        with self.generating.active():
            groups = await self.generator.generate(prompts, sampling=sampling, session=session)
        self.num_generated_tokens += sum(len(c.token_ids) for group in groups for c in group)
        return groups


@dataclass(kw_only=True, slots=True)
class Episode:
    """One episode of one sample."""

    runner: Episodes
    environment: EnvironmentCalls
    prompt: Prompt
    sample: int
    sampling: SamplingParams
    session: str | None
    turns: list[Turn] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    """All tokens so far, in parts."""

    async def run(self, completion: Completion) -> Rollout:
        """Play the episode from the first completion to its end."""
        started, limits = now_s(), self.runner.limits
        messages, prompt_ids = self.environment.messages, self.prompt.token_ids
        while True:
            self.tokens += [prompt_ids, completion.token_ids]
            text = self.runner.renderer.text(completion.token_ids)
            observation, failure = Observation(), None
            try:
                observation = await self.environment.step(Reply(text=text, completion=completion))
            except EnvironmentFailedError as error:
                failure = self._failure(str(error), text, error)
            self.turns.append(
                Turn(
                    messages=messages,
                    prompt_ids=prompt_ids,
                    completion=completion,
                    text=text,
                    observation=observation,
                )
            )
            if failure is not None:
                return self._rollout("failed", failure)
            messages = tuple(observation.messages)
            if not messages:
                return self._rollout("done")
            if len(self.turns) >= limits.max_turns:
                return self._rollout("turns")
            if now_s() - started > limits.timeout_s:
                return self._rollout("time")
            try:
                prompt_ids = self.runner.renderer.continuation(messages, after=completion)
            except Exception as error:  # noqa: BLE001  (raised by a template or tokenizer for these messages)
                what = f"the renderer refused the environment's messages ({error!r})"
                return self._rollout("failed", self._failure(what, text, error))
            room = self.runner.limit - sum(map(len, self.tokens)) - len(prompt_ids)
            if room < 1:
                return self._rollout("tokens")
            completion = await self._reply(prompt_ids, room=room)

    def _failure(self, what: str, text: str, error: Exception) -> str:
        """Log a failure and return its message."""
        num_turns = len(self.tokens) // 2  # of each a prompt and a completion
        failure = f"{what} in turn {num_turns} of problem {self.prompt.problem.id!r}, reply {text!r}"
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

    def _seed(self, seed: int) -> int:
        """Derive the seed of this turn, different for each problem, sample and turn."""
        key = f"{seed} problem {self.prompt.problem.id} sample {self.sample} turn {len(self.turns)}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2

    def _rollout(self, end: EndReason, failure: str | None = None) -> Rollout:
        return Rollout(
            prompt=self.prompt, sample=self.sample, turns=tuple(self.turns), end=end, failure=failure
        )


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return the results in order; after an error or a cancellation cancel all, and wait until they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
