"""The generators of a run: the way of weights to them, and their replacement when they are lost.

    pool = GeneratorPool([Role(group, start=...), ...], trainer=trainer, store=store, parity=text)
    generator = Router([GeneratorClient(member) for member in pool.members], pool=pool)
    await pool.serve(await pool.push())

A generator is lost when one of its processes ends or its engine fails, which shows in a call or in
a look at the processes twice a second. It is restarted in the background, pulls the version that is
served, is checked as after any pull, and only then receives prompts. No caller waits for it while
another generator is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from actors.calls import (
    PEER_GRACE_S,
    ActorGroup,
    ActorLostError,
    ActorTimeoutError,
    CallGroup,
    first_line,
)
from actors.deaths import LOOK_EVERY_S
from actors.parity import ParityText
from actors.recovery import PARITY_ERRORS, Role
from rl.types import ServeResult
from rl.utils.clock import now_s
from rl.utils.errors import RunError
from rl.weights.checksum import check_sums
from rl.weights.store import WeightStore
from rl.weights.types import WeightStoreError

logger = logging.getLogger(__name__)


class GeneratorPool:
    """A `Publisher`: trainer ranks push, every generator pulls and is checked.

    Pulls exclude each other, so that all generators that are up hold the same version.
    """

    def __init__(
        self,
        members: Sequence[Role],
        *,
        trainer: Role,
        store: WeightStore,
        parity: ParityText | None = None,
        drains: bool = False,
    ) -> None:
        """
        Args:
            members: the generators. Their restarts end with `join`.
            parity: text of the logprob parity; None compares checksums only.
            drains: a pull first waits for running completions.
        """
        self.members = tuple(members)
        self.trainer = trainer
        self.store = store
        self.parity = parity
        self._drains = drains
        self._expected: dict[int, asyncio.Future[list[Any]]] = {}
        """The trainer's logprobs of the text, by version, requested with the push."""
        self._pulling = asyncio.Lock()
        """Held during every pull: by `serve` or by a generator that joins."""
        self._version: int | None = None
        """Version that all members that are up hold, or are about to."""
        self._served = ServeResult()

    @property
    def policy_version(self) -> int | None:
        """Version that the generators hold, or are about to pull; None before the first one."""
        return self._version

    async def watch(self) -> None:
        """Look for dead generators also while no call is made, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for member in self.members:
                if member.is_up and (dead := member.group.dead()):
                    message = f"rank {', '.join(map(str, dead))} is dead: its process ended"
                    member.lose(member.group, ActorLostError(message, role=member.name, ranks=dead))

    def up(self) -> list[int]:
        """Return the numbers of the generators that can be called; raise RunError if one was lost
        too often.
        """
        for member in self.members:
            if member.failure is not None:
                raise member.failure
        return [number for number, member in enumerate(self.members) if member.is_up]

    async def wait_until_one_is_up(self) -> None:
        """Wait for a generator; restarts have deadlines. Raise RunError if a generator was lost too
        often.
        """
        while not self.up():
            restarts = [
                member.restarting for member in self.members if member.restarting is not None
            ]
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    async def push(self, *, model_id: str | None = None, version: int | None = None) -> int:
        """Push the weights of the run, or those of a model by id under the version given."""
        # Both calls are sent here and now, before anything else that the trainer is asked for. The
        # logprobs are awaited while the generators pull.
        push = asyncio.ensure_future(
            self.trainer.call("push_model_state_dict", model_id=model_id, version=version)
        )
        expected = None
        if self.parity is not None:
            expected = asyncio.ensure_future(
                self.trainer.call("compute_logprobs", [self.parity.sample])
            )
        try:
            pushed = self.store.announce(await push).version
        except BaseException:
            if expected is not None:
                await _give_up(expected)
            raise
        if expected is not None:
            self._expected[pushed] = expected
        return pushed

    async def serve(self, policy_version: int) -> ServeResult:
        """Let all generators that are up, and those that join later, pull this version.

        Raises:
            ActorLostError: the trainer is lost.
            RunError: a pull has failed, or a generator was lost too often.
        """
        async with self._pulling:
            up = [self.members[number] for number in self.up()]
            self._version = policy_version
            self._served, _ = await self._pull_from_living(policy_version, up)
        # If all were lost in the pull: a generator that joins has pulled this version.
        await self.wait_until_one_is_up()
        # The Tinker backend never has more than `keep_versions` versions, so it loses no snapshot
        # here.
        await self.trainer.group.while_alive(self.store.prune(), "pruning of old versions")
        return self._served

    async def join(self, group: ActorGroup) -> ActorGroup:
        """Give a restarted generator the weights that the other generators hold, and return it."""
        joining = Role(group)
        async with self._pulling:
            await joining.call("use_store", self.store)
            lost: Sequence[ActorLostError] = ()
            if self._version is not None:
                try:
                    self._served, lost = await self._pull_from_living(self._version, [joining])
                except ActorLostError as error:
                    # The trainer is lost: all generators wait for the next version.
                    logger.info("%s joins without weights: %s", joining.name, error)
            if lost:
                raise lost[0]
            # The member has this group before another task runs: no await follows.
            return group

    @asynccontextmanager
    async def without_weights(self) -> AsyncIterator[None]:
        """Prevent pulls while the store is replaced, and forget all versions of the trainer that
        was lost.
        """
        async with self._pulling:
            self._version = None
            while self._expected:
                await _give_up(self._expected.popitem()[1])
            yield

    async def use_store(self) -> None:
        """Abort all requests and switch to the new store; call it in `without_weights`."""
        await asyncio.gather(*(self._use_store(member) for member in self.members if member.is_up))

    async def _use_store(self, member: Role) -> None:
        group = member.group
        try:
            await member.call("abort", None)
            await member.call("use_store", self.store)
        except ActorLostError as error:
            logger.info("%s", error)  # its replacement gets the store when it joins
        except ActorTimeoutError as error:
            # The generator hangs: restart it instead of the trainer.
            member.lose(group, ActorLostError(str(error), role=member.name))

    async def _pull_from_living(
        self, version: int, generators: Sequence[CallGroup]
    ) -> tuple[ServeResult, Sequence[ActorLostError]]:
        """See `pull`; raise ActorLostError if the trainer is lost meanwhile."""
        what, trainer = f"pull of version {version}", self.trainer.group
        try:
            # A dead trainer's memory gives nothing, which a generator would only notice at its
            # deadline.
            return await trainer.while_alive(self.pull(version, generators=generators), what)
        except (ActorLostError, *PARITY_ERRORS):
            raise
        except RunError as error:
            # A generator may be the first to notice that the trainer is dead.
            if dead := await trainer.seen_dead(PEER_GRACE_S):
                message = f"{trainer.name}.{what} failed: {first_line(error)}"
                raise ActorLostError(message, role=trainer.name, ranks=dead) from error
            raise

    async def pull(
        self, version: int, *, generators: Sequence[CallGroup]
    ) -> tuple[ServeResult, Sequence[ActorLostError]]:
        """Let every generator pull the version, and check each; also return the errors of lost
        generators.

        Raises:
            WeightParityError: names generator, tensor and version.
            LogprobParityError: names generator and version.
            WeightStoreError: the version is deleted or given up.
        """
        snapshot = self.store.snapshot(version)
        try:
            calls = []
            for generator in generators:
                extra_s = generator.timeouts.generate_s if self._drains else 0.0
                calls.append(generator.call("pull_model_state_dict", snapshot, extra_s=extra_s))
            answers, lost = await _answers(generators, calls)
            pulled = {g.name: [box for of_rank in ranks for box in of_rank] for g, ranks in answers}
            check_sums(version=version, pushed=snapshot.sums, pulled=pulled)
            started = now_s()
            diff, lost_later = await self._compare(version, [g for g, _ in answers])
            result = ServeResult(parity_diff=diff, parity_s=now_s() - started)
        except BaseException:
            # The version is still served: logprobs that are there are for the next generator that
            # pulls it.
            if version in self._expected and not self._expected[version].done():
                await _give_up(self._expected.pop(version))
            raise
        self._expected = {v: expected for v, expected in self._expected.items() if v >= version}
        return result, [*lost, *lost_later]

    async def _compare(
        self, version: int, generators: Sequence[CallGroup]
    ) -> tuple[float | None, list[ActorLostError]]:
        """Return the largest difference of a generator's logprobs from the trainer's, in nats a
        token.
        """
        if self.parity is None:
            return None, []
        if version not in self._expected:
            raise WeightStoreError(
                f"version {version} was given up: the trainer's logprobs of the parity text are "
                "gone; push a new version"
            )
        # The trainer's logprobs first, as trainer and generators may have to take turns on a
        # device.
        logprobs_T = (await asyncio.shield(self._expected[version]))[0][0]
        calls = [g.call("compute_logprobs", [self.parity.token_ids]) for g in generators]
        answers, lost = await _answers(generators, calls)
        found = {g.name: ranks[0][0] for g, ranks in answers}
        if not found:
            return None, lost
        return self.parity.check(policy_version=version, expected_T=logprobs_T, found=found), lost


async def _answers(
    groups: Sequence[CallGroup], calls: Sequence[Coroutine[Any, Any, list[Any]]]
) -> tuple[list[tuple[CallGroup, list[Any]]], list[ActorLostError]]:
    """Await a call to each group; return the answers with their groups, and the errors of lost
    groups.
    """

    async def answer_of(call: Coroutine[Any, Any, list[Any]]) -> list[Any] | ActorLostError:
        try:
            return await call
        except ActorLostError as error:
            return error

    results = await asyncio.gather(*map(answer_of, calls))
    answers = [
        (group, result)
        for group, result in zip(groups, results, strict=True)
        if not isinstance(result, ActorLostError)
    ]
    return answers, [result for result in results if isinstance(result, ActorLostError)]


async def _give_up(answer: asyncio.Future[list[Any]]) -> None:
    """Cancel an answer that is no longer needed, and ignore its error."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
