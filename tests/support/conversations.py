"""Multi-turn environments and a generator whose sampled tokens differ from the encoded text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rl.rollouts.renderer import Renderer
from rl.types import (
    Completion,
    Message,
    Observation,
    Problem,
    Prompt,
    Reply,
    Rollout,
    SamplingParams,
    Turn,
)
from tests.support.fakes import completion_of

END = 200
"""Token id that ends a reply."""


class TwinTokenizer:
    """Tokenizer with two ids for each lower-case letter; `encode` uses only one of them."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t - 128 if 225 <= t < 251 else t for t in token_ids if t != END).decode()

    @staticmethod
    def twins(text: str) -> list[int]:
        """Return the ids that `encode` never returns."""
        return [b + 128 if 97 <= b < 123 else b for b in text.encode()]


class TwinRenderer(Renderer):
    """Renderer of `<u>question<a>` and, between two replies, `</a><u>message<a>`."""

    stop_token_ids: tuple[int, ...] = (END,)

    def __init__(self) -> None:
        self.tokenizer = TwinTokenizer()

    def opening(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        return self._ids("".join(f"<{m.role[0]}>{m.content}" for m in messages) + "<a>")

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        closed = "" if after.token_ids[-1] == END else "!"
        return self._ids(
            closed + "</a>" + "".join(f"<{m.role[0]}>{m.content}" for m in messages) + "<a>"
        )

    def reply(self, text: str, *, prompt_ids: np.ndarray | None = None) -> np.ndarray:
        return np.append(self._ids(text), np.int32(END))

    def check_multi_turn(self) -> None:
        """Accept several turns."""

    def text(self, token_ids: np.ndarray, *, prompt_ids: np.ndarray | None = None) -> str:
        return self.tokenizer.decode(token_ids.tolist())

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), dtype=np.int32)


@dataclass(kw_only=True)
class ScriptedGenerator:
    """Generator of scripted replies in twin ids; policy version and logprobs differ between
    calls.
    """

    reply: Callable[[str, SamplingParams, int], str]
    """Function from a prompt's text and the sample number to the reply."""
    seconds: Callable[[str], float] = lambda prompt: 0.0
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    """Token ids and params of each prompt."""
    sessions: list[str | None] = field(default_factory=list)
    """Session of each call."""
    made: list[Completion] = field(default_factory=list)

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        self.asked += [(p.tolist(), sampling) for p in prompts]
        self.sessions.append(session)
        version = len(self.asked)
        texts = [TwinTokenizer().decode(p.tolist()) for p in prompts]
        await asyncio.sleep(max(map(self.seconds, texts)))
        samples = range(sampling.num_samples)
        groups = [
            [_drawn(self.reply(t, sampling, i), version, sampling.max_tokens) for i in samples]
            for t in texts
        ]
        self.made += [c for group in groups for c in group]
        return groups


def _drawn(text: str, version: int, max_tokens: int) -> Completion:
    whole = [*TwinTokenizer.twins(text), END]
    token_ids = np.array(whole[:max_tokens], dtype=np.int32)
    return Completion(
        token_ids=token_ids,
        logprobs=-(np.arange(len(token_ids), dtype=np.float32) + 1) / (version + 1),
        policy_versions=np.full(len(token_ids), version, dtype=np.int32),
        finish_reason="stop" if len(whole) <= max_tokens else "length",
    )


@dataclass(kw_only=True)
class Counting:
    """Environment of `turns` further turns, in which it says `says`, that counts its steps and
    closes.
    """

    runs_inline: ClassVar[bool] = True
    """Runs on the event loop, so that its seconds are virtual."""
    problem: Problem
    turns: int = 2
    says: str = "more"
    seconds: float = 0.0
    num_steps: int = 0
    num_closed: int = 0
    replies: list[Reply] = field(default_factory=list)

    def opening(self) -> Sequence[Message]:
        return (Message(role="user", content=self.problem.question),)

    async def step(self, reply: Reply) -> Observation:
        await asyncio.sleep(self.seconds)
        self.replies.append(reply)
        self.num_steps += 1
        more = (Message(role="user", content=f"{self.says} {self.num_steps}"),)
        return Observation(messages=more if self.num_steps <= self.turns else ())

    async def close(self) -> None:
        self.num_closed += 1


class Factory:
    """Environment factory that keeps the environments it made."""

    def __init__(self, kind: Callable[..., Any] = Counting, **settings: Any) -> None:
        self.kind, self.settings = kind, settings
        self.made: list[Any] = []

    def __call__(self, problem: Problem) -> Any:
        self.made.append(self.kind(problem=problem, **self.settings))
        return self.made[-1]

    @property
    def closed(self) -> list[int]:
        return [environment.num_closed for environment in self.made]


def conversation(
    *parts: tuple[int, Completion], rewards: Sequence[float] = (), sample: int = 0
) -> Rollout:
    """Return a rollout of turns, each with a prompt length (ids 1, 1, ...) and a completion."""
    given = [*rewards, *[0.0] * (len(parts) - len(rewards))]
    turns = tuple(
        Turn(
            messages=(),
            prompt_ids=np.ones(num_told, dtype=np.int32),
            completion=made,
            text="",
            observation=Observation(reward=reward),
        )
        for (num_told, made), reward in zip(parts, given, strict=True)
    )
    problem = Problem(id="p", question="q", answer="a")
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=sample, turns=turns)


def drawn(*token_ids: int, version: int = 0, logprob: float = -1.0) -> Completion:
    return completion_of(token_ids, version=version, logprob=logprob)
