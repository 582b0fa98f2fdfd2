"""Scripted policy whose calls take virtual time, with a log of events and staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.types import (
    Completion,
    ForwardBackwardResult,
    OptimParams,
    OptimStepResult,
    ServeResult,
    TrainingSample,
)
from tests.support.fakes import FakePolicy
from tests.support.virtual_time import now_s


@dataclass(kw_only=True)
class SimulatedPolicy(FakePolicy):
    """A `FakePolicy` in virtual seconds.

    A completion's first token has the version served when it starts, other tokens the version served when it ends.
    """

    generate_s: Callable[[str], float] = lambda prompt: 1.0
    train_s: float = 1.0
    push_s: float = 0.1
    serve_s: float = 0.1
    events: list[tuple[float, str]] = field(default_factory=list)
    """Virtual time and name of each event."""
    age_of_tokens: list[int] = field(default_factory=list)
    """Staleness of every trained token in versions, measured independently of the loop."""
    num_running: int = 0
    most_running: int = 0
    num_pushing: int = 0

    async def generate(self, prompts: Sequence[np.ndarray], **settings: Any) -> list[list[Completion]]:
        started_at = self.served_version
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(max(self.generate_s(bytes(p.tolist()).decode()) for p in prompts))
        finally:
            self.num_running -= 1
        groups = await super().generate(prompts, **settings)
        if settings.get("begun") is not None:
            return groups
        return [[_begun_at(made, started_at) for made in group] for group in groups]

    async def forward_backward(
        self, samples: Sequence[TrainingSample], **settings: Any
    ) -> ForwardBackwardResult:
        self.events.append((now_s(), "forward_backward"))
        versions = np.concatenate([s.policy_versions[s.mask] for s in samples])
        self.age_of_tokens += (self.version - versions).tolist()
        await asyncio.sleep(self.train_s)
        return await super().forward_backward(samples, **settings)

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        assert self.num_pushing == 0, "the weights change while they are pushed"
        self.events.append((now_s(), "optim_step"))
        return await super().optim_step(params)

    async def push(self) -> int:
        self.events.append((now_s(), "push"))
        self.num_pushing += 1
        version = await super().push()
        await asyncio.sleep(self.push_s)
        self.num_pushing -= 1
        return version

    async def serve(self, policy_version: int) -> ServeResult:
        await asyncio.sleep(self.serve_s)
        self.events.append((now_s(), f"serve {policy_version}"))
        return await super().serve(policy_version)


def _begun_at(made: Completion, version: int) -> Completion:
    versions = made.policy_versions.copy()
    versions[0] = version
    return replace(made, policy_versions=versions)
