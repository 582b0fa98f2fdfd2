"""One sampler out of several generators: which of them a prompt goes to."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from actors.calls import ActorLostError
from rl.protocols import ResumableSampler
from rl.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

Strategy = Literal["least_loaded", "round_robin", "sticky"]
MAX_SESSIONS = 65_536
"""Sessions that are remembered; the one not used for longest is forgotten first."""


class Pool(Protocol):
    """Of replicas that may be lost and replaced: a `GeneratorPool`."""

    def up(self) -> Sequence[int]:
        """Who can be asked now, by their numbers; raises RunError where that is over."""
        ...

    async def one_up(self) -> None:
        """Until there is one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """One call of `generate`."""

    prompts: Sequence[np.ndarray]
    sampling: SamplingParams
    session: str | None
    begun: Sequence[Sequence[Completion]] | None
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """What was answered, by the prompt's place."""


class Router:
    """A `ResumableSampler` over replicas.

    Prompts of one call are spread over the replicas; equal prompts of a call stay together, so that their
    samples have seeds of their own. The completions do not depend on the way that was chosen, also where they
    go on with what another replica began, or are drawn anew because one was lost.
    """

    def __init__(
        self,
        replicas: Sequence[ResumableSampler],
        *,
        strategy: Strategy = "least_loaded",
        pool: Pool | None = None,
    ) -> None:
        """
        Args:
            pool: knows which of the replicas can be asked. What one has not answered when it is lost, others
                are asked for. None: all can always be asked, and a lost one is an error.
            strategy: least_loaded: where the fewest samples are under way; round_robin: in turn; sticky:
                calls of one session where its first one went, which has their keys and values, others as
                least_loaded.
        """
        self.replicas = list(replicas)
        self.strategy = strategy
        self._pool = pool
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
        call = _Call(prompts=prompts, sampling=sampling, session=session, begun=begun)
        await self._spread(range(len(prompts)), call)
        return [call.groups[place] for place in range(len(prompts))]

    async def _spread(self, prompts: Iterable[int], call: _Call) -> None:
        """Ask for these prompts of the call, by their places in it, those that are up."""
        if self._pool is not None:
            await self._pool.one_up()
        places: dict[int, list[int]] = {}
        replica_of_prompt: dict[bytes, int] = {}
        for place in prompts:
            key = np.asarray(call.prompts[place], dtype=np.int32).tobytes()
            if key not in replica_of_prompt:
                replica_of_prompt[key] = self._choose(call.session)
            replica = replica_of_prompt[key]
            self.num_running[replica] += call.sampling.num_samples
            places.setdefault(replica, []).append(place)
        await _all(self._ask(replica, of_replica, call) for replica, of_replica in places.items())

    async def _ask(self, replica: int, places: Sequence[int], call: _Call) -> None:
        try:
            answers = await self.replicas[replica].generate(
                [call.prompts[place] for place in places],
                sampling=call.sampling,
                session=call.session,
                begun=None if call.begun is None else [call.begun[place] for place in places],
            )
        except ActorLostError as error:
            if self._pool is None:
                raise
            logger.info("%d prompts go to another generator: %s", len(places), error)
        else:
            call.groups.update(zip(places, answers, strict=True))
            return
        finally:
            self.num_running[replica] -= call.sampling.num_samples * len(places)
        await self._spread(places, call)

    async def abort(self) -> int:
        """As `ResumableSampler.abort`, on every replica; prompts of one that is lost are asked for anew."""
        return sum(await asyncio.gather(*(self._abort(replica) for replica in self._up())))

    async def _abort(self, replica: int) -> int:
        try:
            return await self.replicas[replica].abort()
        except ActorLostError:
            if self._pool is None:
                raise
            return 0

    def _up(self) -> Sequence[int]:
        """Those that can be asked, by their numbers."""
        return range(len(self.replicas)) if self._pool is None else self._pool.up()

    def _choose(self, session: str | None) -> int:
        up = self._up()
        if self.strategy == "round_robin":
            self._turn += 1
            return up[(self._turn - 1) % len(up)]
        least_loaded = min(up, key=lambda number: self.num_running[number])
        if self.strategy == "least_loaded" or session is None:
            return least_loaded
        replica = self._replica_of_session.pop(session, least_loaded)
        if replica not in up:
            replica = least_loaded
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
