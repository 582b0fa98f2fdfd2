"""One sampler out of several generators: which of them a prompt goes to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from rl.protocols import ResumableSampler
from rl.types import Completion, SamplingParams

Strategy = Literal["least_loaded", "round_robin", "sticky"]
MAX_SESSIONS = 65_536
"""Sessions that are remembered; the one not used for longest is forgotten first."""


class Router:
    """A `ResumableSampler` over replicas.

    Prompts of one call are spread over the replicas; equal prompts of a call stay together, so that their
    samples have seeds of their own. The completions do not depend on the way that was chosen, also where they
    go on with what another replica began.
    """

    def __init__(self, replicas: Sequence[ResumableSampler], *, strategy: Strategy = "least_loaded") -> None:
        """
        Args:
            strategy: least_loaded: where the fewest samples are under way; round_robin: in turn; sticky:
                calls of one session where its first one went, which has their keys and values, others as
                least_loaded.
        """
        self.replicas = list(replicas)
        self.strategy = strategy
        self.num_running = [0] * len(self.replicas)
        """Samples under way, by replica."""
        self._turn = 0
        self._replica_of_session: OrderedDict[str, int] = OrderedDict()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """As `ResumableSampler.generate`."""
        if begun is not None and len(begun) != len(prompts):
            raise ValueError(f"begun has completions of {len(begun)} prompts, there are {len(prompts)}")
        places: dict[int, list[int]] = {}
        replica_of_prompt: dict[bytes, int] = {}
        for place, prompt in enumerate(prompts):
            key = np.asarray(prompt, dtype=np.int32).tobytes()
            if key not in replica_of_prompt:
                replica_of_prompt[key] = self._choose(session)
            replica = replica_of_prompt[key]
            self.num_running[replica] += sampling.num_samples
            places.setdefault(replica, []).append(place)
        groups: dict[int, list[Completion]] = {}

        async def ask(replica: int, of_replica: list[int]) -> None:
            try:
                answers = await self.replicas[replica].generate(
                    [prompts[place] for place in of_replica],
                    sampling=sampling,
                    session=session,
                    begun=None if begun is None else [begun[place] for place in of_replica],
                )
            finally:
                self.num_running[replica] -= sampling.num_samples * len(of_replica)
            groups.update(zip(of_replica, answers, strict=True))

        await _all(ask(*item) for item in places.items())
        return [groups[place] for place in range(len(prompts))]

    async def abort(self) -> int:
        """As `ResumableSampler.abort`, on every replica."""
        return sum(await asyncio.gather(*(replica.abort() for replica in self.replicas)))

    def _choose(self, session: str | None) -> int:
        if self.strategy == "round_robin":
            self._turn += 1
            return (self._turn - 1) % len(self.replicas)
        if self.strategy == "least_loaded" or session is None:
            return self.num_running.index(min(self.num_running))
        replica = self._replica_of_session.pop(session, None)
        if replica is None:
            replica = self.num_running.index(min(self.num_running))
        self._replica_of_session[session] = replica
        if len(self._replica_of_session) > MAX_SESSIONS:
            self._replica_of_session.popitem(last=False)
        return replica


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; if one fails, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
