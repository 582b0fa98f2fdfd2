"""Episodes: a model and an environment take turns, as a token sequence that only grows.

    opening -> prompt -> completion -> reply -> step -> messages -> further prompt -> completion ->
    ...

The model's tokens stay exactly as the engine produced them; only the environment's messages are
tokenized.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Protocol

import numpy as np

from rl.config.configurable import check_refused, refused
from rl.config.tree import check_bounds
from rl.protocols import TokenGenerator
from rl.rollouts.environment import EnvironmentCalls, EnvironmentFailedError, Environments
from rl.rollouts.renderer import Renderer, render_prompt
from rl.types import (
    Completion,
    EndReason,
    Message,
    Problem,
    Prompt,
    Reply,
    Rollout,
    SamplingParams,
    Turn,
)
from rl.utils.clock import BusyClock, now_s
from rl.utils.printing import describe_value
from rl.utils.threads import gather_or_cancel

logger = logging.getLogger(__name__)

WHOLE_DISTRIBUTION = refused("the trainer's logprobs are of the whole distribution")


@dataclass(kw_only=True, slots=True)
class Sampling:
    """Sampling of training completions."""

    max_tokens: int = 32
    """Most new tokens of one completion."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it, so that both use the same
    distribution.
    """
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
    """Longest time an environment may take to answer a reply, or to close; then the rollout fails.
    """
    timeout_s: float = 600.0
    """Time after the first reply from which on no further turn begins."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_turns", at_least=1)
        check_bounds(self, "max_tokens", at_least=2)
        check_bounds(self, "step_timeout_s", "timeout_s", above=0, below=math.inf)


class RolloutSource(Protocol):
    """Source of rollouts: episodes with environments, or agents (`rl.agents.rollouts`)."""

    generating: BusyClock
    """Time in which completions were drawn."""
    num_generated_tokens: int

    async def run(
        self, problems: Sequence[Problem], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Rollout]]:
        """Return [P][G] rollouts, where G is `sampling.num_samples`."""
        ...


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

        All first turns are one call of the generator, every later turn is a call of its own, all of
        one session. With a seed the result depends only on it, the problems and the weights.

        Raises:
            ValueError: the environment of a problem cannot be made or opened, or its prompt leaves
                no room.
        """
        async with self.environments.opened(problems, num=sampling.num_samples) as environments:
            # The first reply must have room for its most tokens; later ones get what is left.
            room = self.limit - sampling.max_tokens
            prompts, prompt_ids = list[Prompt](), list[np.ndarray]()
            for problem, group in zip(problems, environments, strict=True):
                # The environments of a group open alike, so they share one prompt.
                messages = group[0].messages
                prompt = render_prompt(problem, messages, renderer=self.renderer, max_tokens=room)
                prompts.append(prompt)
                prompt_ids.append(prompt.token_ids)
            firsts = await self._draw(prompt_ids, sampling, session)

            # Lazy: a coroutine that is made and never awaited, because one before failed, warns.
            episodes = (
                self._play(*start, sampling=sampling, session=session)
                for start in _list_starts(environments, prompts, firsts)
            )
            rollouts = []
            if all(environment.ends_at_once for environment in chain(*environments)):
                # Episodes that wait for nothing need no task of their own.
                for episode in episodes:
                    rollouts.append(await episode)
            else:
                rollouts = await gather_or_cancel(episodes)
            in_order = iter(rollouts)
            return [list(islice(in_order, len(group))) for group in environments]

    @property
    def limit(self) -> int:
        """Most tokens of an episode."""
        limit = self.limits.max_tokens
        return self.max_tokens if limit is None else min(limit, self.max_tokens)

    async def _draw(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, session: str | None
    ) -> list[list[Completion]]:
        """Return completions of the generator, and count their time and tokens."""
        with self.generating.measure():
            groups = await self.generator.generate(prompts, sampling=sampling, session=session)
        for completion in chain.from_iterable(groups):
            self.num_generated_tokens += len(completion.token_ids)
        return groups

    async def _play(
        self,
        environment: EnvironmentCalls,
        prompt: Prompt,
        sample: int,
        completion: Completion,
        *,
        sampling: SamplingParams,
        session: str | None,
    ) -> Rollout:
        """Play one sample's episode from its first completion to its end."""
        started, messages, prompt_ids = now_s(), environment.messages, prompt.token_ids
        turns: list[Turn] = []
        tokens: list[np.ndarray] = []
        while True:
            tokens += [prompt_ids, completion.token_ids]
            text = self.renderer.text(completion.token_ids, prompt_ids=prompt_ids)
            turn = partial(
                Turn, messages=messages, prompt_ids=prompt_ids, completion=completion, text=text
            )
            try:
                observation = await environment.step(Reply(text=text, completion=completion))
            except EnvironmentFailedError as error:
                return _fail([*turns, turn()], error, prompt=prompt, sample=sample)
            turns.append(turn(observation=observation))

            end = self._end(turns, started=started)
            if end is None:
                messages = observation.messages
                try:
                    prompt_ids = self._render_continuation(messages, after=completion)
                except EnvironmentFailedError as error:
                    return _fail(turns, error, prompt=prompt, sample=sample)
            # A further turn needs room for at least one token of a reply.
            room = self.limit - sum(map(len, tokens)) - len(prompt_ids)
            if end is None and room < 1:
                end = "tokens"
            if end is not None:
                return Rollout(prompt=prompt, sample=sample, turns=tuple(turns), end=end)

            max_tokens = min(sampling.max_tokens, room)
            seed = _turn_seed(sampling.seed, prompt.problem, sample, turn=len(turns))
            one = replace(sampling, num_samples=1, max_tokens=max_tokens, seed=seed)
            ((completion,),) = await self._draw(
                [np.concatenate([*tokens, prompt_ids])], one, session
            )

    def _render_continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """Return the next turn's prompt tokens.

        Raises EnvironmentFailedError if the messages cannot be rendered.
        """
        try:
            return self.renderer.continuation(messages, after=after)
        except Exception as refused:  # by a template or tokenizer, for these messages
            raise EnvironmentFailedError(
                f"the renderer refused the environment's messages ({describe_value(refused)})"
            ) from refused

    def _end(self, turns: Sequence[Turn], *, started: float) -> EndReason | None:
        """Return why an episode ends after its last turn, or None."""
        if not turns[-1].observation.messages:
            return "done"
        if len(turns) >= self.limits.max_turns:
            return "turns"
        return "time" if now_s() - started > self.limits.timeout_s else None


Start = tuple[EnvironmentCalls, Prompt, int, Completion]
"""Environment, prompt, number in the group and first completion of an episode."""


def _list_starts(
    environments: Sequence[Sequence[EnvironmentCalls]],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
) -> Iterator[Start]:
    """Yield the start of each episode, group by group."""
    for group, prompt, completions_G in zip(environments, prompts, completions, strict=True):
        for sample, pair in enumerate(zip(group, completions_G, strict=True)):
            environment, completion = pair
            yield environment, prompt, sample, completion


def _fail(
    turns: Sequence[Turn], error: EnvironmentFailedError, *, prompt: Prompt, sample: int
) -> Rollout:
    """Return a rollout whose environment failed in its last turn, and log why."""
    where = (
        f"turn {len(turns)} of problem {describe_value(prompt.problem.id)}, reply "
        f"{describe_value(turns[-1].text)}"
    )
    failure = f"{error} in {where}"
    logger.warning("%s", failure, exc_info=error)
    return Rollout(prompt=prompt, sample=sample, turns=tuple(turns), end="failed", failure=failure)


def _turn_seed(seed: int | None, problem: Problem, sample: int, *, turn: int) -> int | None:
    """Derive a turn's seed, different for each problem, sample and turn."""
    if seed is None:
        return None
    key = f"{seed} problem {problem.id} sample {sample} turn {turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
