"""Router of prompts to the generators of a run."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from actors.calls import ActorLostError
from rl.protocols import ResumableGenerator
from rl.types import Completion, SamplingParams
from rl.utils.threads import all_or_cancel

if TYPE_CHECKING:
    from actors.config import Strategy
    from actors.pool import GeneratorPool

logger = logging.getLogger(__name__)

MAX_SESSIONS = 65_536
"""Number of remembered sessions; the least recently used one is forgotten first."""


class CallSeeds:
    """Seeds of calls that bring none, derived from the run's seed, the policy version and the
    number of the call.

    Generators cannot draw them: replicas with one seed would draw the same numbers, and so would a
    restarted generator. A run that goes on from a checkpoint counts its calls anew, at a later
    version.
    """

    def __init__(
        self, seed: int = 0, *, policy_version: Callable[[], int | None] = lambda: None
    ) -> None:
        self._seed = seed
        self._policy_version = policy_version
        self._numbers = itertools.count()

    def draw(self) -> int:
        """Return a seed below 2**62 that no other call of this run has."""
        key = f"{self._seed} version {self._policy_version()} call {next(self._numbers)}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % 2**62


class Router:
    """A `ResumableGenerator` over replicas.

    Prompts of one call are spread over the replicas; equal prompts of a call stay together, so that
    their samples get different seeds. The completions do not depend on the choice of the replica,
    even if one replica continues what another began, or draws again what a lost one had not
    finished.
    """

    def __init__(
        self,
        replicas: Sequence[ResumableGenerator],
        *,
        pool: GeneratorPool,
        strategy: Strategy = "least_loaded",
        seeds: CallSeeds | None = None,
    ) -> None:
        """
        Args:
            pool: knows which replicas can be called; prompts of a lost replica go to another one.
            strategy: least_loaded: the replica with the fewest samples under way; round_robin: in
                turn; sticky: all calls of one session go to the same replica, which has their keys
                and values, and calls without a session to the least loaded one.
            seeds: of calls without a seed.
        """
        self.replicas = list(replicas)
        self._seeds = CallSeeds() if seeds is None else seeds
        self.strategy = strategy
        self._pool = pool
        self.num_running = [0] * len(self.replicas)
        """Unfinished samples, by replica."""
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
        if begun is not None and len(begun) != len(prompts):
            raise ValueError(
                f"begun has completions of {len(begun)} prompts, there are {len(prompts)}"
            )
        groups: dict[int, list[Completion]] = {}
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.draw())

        async def spread(places: Iterable[int]) -> None:
            """Send these prompts of the call, given by index, to the replicas that are up."""
            await self._pool.wait_until_one_is_up()
            places_of: dict[int, list[int]] = {}
            replica_of_prompt: dict[bytes, int] = {}
            for place in places:
                key = np.asarray(prompts[place], dtype=np.int32).tobytes()
                if key not in replica_of_prompt:
                    replica_of_prompt[key] = self._choose(session)
                replica = replica_of_prompt[key]
                self.num_running[replica] += sampling.num_samples
                places_of.setdefault(replica, []).append(place)
            await all_or_cancel(ask(replica, places) for replica, places in places_of.items())

        async def ask(replica: int, places: Sequence[int]) -> None:
            try:
                answers = await self.replicas[replica].generate(
                    [prompts[place] for place in places],
                    sampling=sampling,
                    session=session,
                    begun=None if begun is None else [begun[place] for place in places],
                )
            except ActorLostError as error:
                logger.info("%d prompts go to another generator: %s", len(places), error)
            else:
                groups.update(zip(places, answers, strict=True))
                return
            finally:
                self.num_running[replica] -= sampling.num_samples * len(places)
            await spread(places)

        await spread(range(len(prompts)))
        return [groups[place] for place in range(len(prompts))]

    async def abort(self) -> int:
        """Abort on every replica; see `ResumableGenerator.abort`. Prompts of a lost replica are
        sent again.
        """
        return sum(await all_or_cancel(self._abort(replica) for replica in self._pool.up()))

    async def _abort(self, replica: int) -> int:
        try:
            return await self.replicas[replica].abort()
        except ActorLostError:
            return 0

    def _choose(self, session: str | None) -> int:
        up = self._pool.up()
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
