"""Clients of a run's trainer and generators, which implement `rl.protocols`; the router."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from actors.cluster.group import ActorGroup
from actors.cluster.publisher import GeneratorPool
from actors.config import Strategy
from actors.generator import VLLMGenerator
from actors.launch.calls import ActorLostError, ActorTimeoutError
from actors.trainer import PolicyTrainer
from rl.engine_client import EngineClient, FileUse
from rl.ledger.sealing import seal
from rl.protocols import ResumableGenerator
from rl.types import Completion, SamplingParams
from rl.utils.errors import RunError
from rl.utils.threads import gather_or_cancel

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SESSIONS = 65_536
"""Number of remembered sessions; the least recently used one is forgotten first."""


class TrainerClient(EngineClient):
    """A `Trainer` over the ranks of a `PolicyTrainer`; rank 0 answers."""

    def __init__(self, trainer: ActorGroup) -> None:
        self.trainer = trainer

    async def call_engine(
        self,
        method: Callable[..., T],
        *args: Any,
        model_id: str,
        files: FileUse | None = None,
        **options: Any,
    ) -> T:
        """Call the endpoint of `PolicyTrainer` with the name of the engine's method, on all ranks.

        There `PolicyTrainer.call_engine` calls the method in the engine's thread.
        """
        answers = await self.trainer.call(
            method.__name__,
            *args,
            timeout="train_s" if files is None else "checkpoint_s",
            model_id=model_id,
            **options,
        )
        answer: T = answers[0]
        return answer

    async def finish_saving(self) -> None:
        # Another role may have the devices: a checkpoint is written from host memory.
        await self.trainer.call(
            PolicyTrainer.finish_saving, needs_devices=False, timeout="checkpoint_s"
        )


class GeneratorClient:
    """A `ResumableGenerator` over the tensor-parallel ranks of one `VLLMGenerator`."""

    def __init__(self, generator: ActorGroup) -> None:
        self.generator = generator
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
        adapter: int | None = None,
    ) -> list[list[Completion]]:
        """See `ResumableGenerator.generate`.

        `adapter` is the version of one that the generator was given; None: its newest weights.
        """
        # The actor does not see that a caller has gone: the id lets this client end the call.
        call_id = uuid.uuid4().hex
        try:
            answers = await self.generator.call(
                VLLMGenerator.generate,
                list(prompts),
                sampling=sampling,
                call_id=call_id,
                begun=begun,
                adapter=adapter,
                timeout="generate_s",
            )
        except (asyncio.CancelledError, ActorTimeoutError):
            # In the background: requests that cannot be aborted run to their end unobserved.
            ending = asyncio.create_task(self._end(call_id))
            # The event loop holds tasks weakly.
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        return seal(answers[0], prompts, generator=self.generator.name, call=call_id[:16])

    async def abort(self) -> int:
        """End all completions of the generator, also those of other clients.

        A call that still waits for a shared device is not aborted.
        """
        num_ended, *_ = await self.generator.call(
            VLLMGenerator.abort, None, needs_devices=False, timeout="close_s"
        )
        return int(num_ended)

    async def _end(self, call_id: str) -> None:
        try:
            await self.generator.call(
                VLLMGenerator.abort, [call_id], needs_devices=False, timeout="close_s"
            )
        except RunError as error:
            # The caller has its error; this was only to free the generator.
            logger.debug(
                "a call to %s that was given up was not ended: %s", self.generator.name, error
            )


class CallSeeds:
    """Seeds of calls that bring none: of the run's seed, the policy version and the call's number.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call of `Router.generate`, and the completions that are there so far."""

    prompts: Sequence[np.ndarray]
    sampling: SamplingParams
    session: str | None
    begun: Sequence[Sequence[Completion]] | None
    completions: dict[int, list[Completion]] = field(default_factory=dict)
    """Completions of each prompt, by its index."""


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
        """Make a router over replicas.

        Args:
            pool: tells which replicas can be called; prompts of a lost replica go to another one.
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
        if sampling.seed is None:
            # One seed for the whole call: another replica draws the same completions again.
            sampling = replace(sampling, seed=self._seeds.draw())
        call = _Call(prompts=prompts, sampling=sampling, session=session, begun=begun)
        await self._spread(call, range(len(prompts)))
        return [call.completions[place] for place in range(len(prompts))]

    async def _spread(self, call: _Call, places: Iterable[int]) -> None:
        """Send these prompts of a call, given by index, to the replicas that are up."""
        await self._pool.wait_until_one_is_up()
        # No await follows until the load is counted: other calls see it when they choose.
        places_of: dict[int, list[int]] = {}
        replica_of_prompt: dict[bytes, int] = {}
        for place in places:
            # A generator numbers equal prompts of a call; two replicas would draw alike.
            key = np.asarray(call.prompts[place], dtype=np.int32).tobytes()
            if key not in replica_of_prompt:
                replica_of_prompt[key] = self._choose(call.session)
            replica = replica_of_prompt[key]
            self.num_running[replica] += call.sampling.num_samples
            places_of.setdefault(replica, []).append(place)
        await gather_or_cancel(
            self._ask(call, replica, places) for replica, places in places_of.items()
        )

    async def _ask(self, call: _Call, replica: int, places: Sequence[int]) -> None:
        """Let a replica complete these prompts of a call; if it is lost, spread them again."""
        begun = call.begun
        try:
            answers = await self.replicas[replica].generate(
                [call.prompts[place] for place in places],
                sampling=call.sampling,
                session=call.session,
                begun=None if begun is None else [begun[place] for place in places],
            )
            call.completions.update(zip(places, answers, strict=True))
            return
        except ActorLostError as error:
            logger.info("%d prompts go to another generator: %s", len(places), error)
        finally:
            self.num_running[replica] -= call.sampling.num_samples * len(places)
        # At once: the prompts do not wait for those of replicas that are up.
        await self._spread(call, places)

    async def abort(self) -> int:
        """Abort on every replica; prompts of a lost replica are sent again."""
        return sum(await gather_or_cancel(self._abort(replica) for replica in self._pool.list_up()))

    async def _abort(self, replica: int) -> int:
        try:
            return await self.replicas[replica].abort()
        except ActorLostError:
            return 0

    def _choose(self, session: str | None) -> int:
        up = self._pool.list_up()
        if self.strategy == "round_robin":
            self._turn += 1
            return up[(self._turn - 1) % len(up)]
        least_loaded = min(up, key=lambda number: self.num_running[number])
        if self.strategy == "least_loaded" or session is None:
            return least_loaded
        # Popped and set again: the order of the dict is that of the last use.
        replica = self._replica_of_session.pop(session, least_loaded)
        if replica not in up:
            replica = least_loaded
        self._replica_of_session[session] = replica
        if len(self._replica_of_session) > MAX_SESSIONS:
            self._replica_of_session.popitem(last=False)
        return replica


def make_router(
    pool: GeneratorPool, *, strategy: Strategy = "least_loaded", seed: int = 0
) -> Router:
    """Return the router of a run with this seed."""
    seeds = CallSeeds(seed, policy_version=lambda: pool.policy_version)
    return Router(
        [GeneratorClient(member) for member in pool.members],
        strategy=strategy,
        pool=pool,
        seeds=seeds,
    )
