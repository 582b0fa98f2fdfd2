"""The generators of a run: the way of weights to them, and their replacement when they are lost.

    pool = GeneratorPool(generators, trainer=trainer, store=store, parity=text)
    generator = Router([GeneratorClient(member) for member in pool.members], pool=pool)
    await pool.pull(await pool.push())

A generator is lost when one of its processes ends or its engine fails, which its `ActorGroup`
notices (group.py). It is restarted in the background (`GeneratorPool._start_with_weights`), pulls
the version that the others hold, is checked as after any pull, and only then receives prompts. No
caller waits for it while another generator is up: the router (clients.py) sends its prompts there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from actors.cluster.group import ActorGroup
from actors.cluster.parity import ParityText
from actors.cluster.recovery import PARITY_ERRORS, Supervisor
from actors.generator import VLLMGenerator
from actors.launch.calls import (
    PEER_GRACE_S,
    ActorLostError,
    ActorTimeoutError,
    get_first_line,
)
from actors.trainer import PolicyTrainer
from rl.types import BASE, RUN, PullResult
from rl.utils.clock import now_s
from rl.utils.errors import RunError
from rl.weights.checksum import check_sums
from rl.weights.store import Snapshot, WeightStore
from rl.weights.types import WeightParityError, WeightStoreError

logger = logging.getLogger(__name__)


class GeneratorPool:
    """A `Publisher`: trainer ranks push, every generator pulls and is checked.

    Pulls exclude each other, so that all generators that are up hold the same version.
    """

    def __init__(
        self,
        generators: Sequence[ActorGroup],
        *,
        trainer: ActorGroup,
        store: WeightStore,
        parity: ParityText | None = None,
        drains: bool = False,
        keeps_base: bool = False,
        start: Callable[[int], Awaitable[ActorGroup]] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Make a pool of running generators.

        Args:
            parity: text of the logprob parity; None compares checksums only.
            drains: a pull of whole weights first waits for running completions.
            keeps_base: keep the base of adapters in the store, for generators that forget it when
                they sleep, while the trainer cannot push it again.
            start: starts a lost generator again, given its number; None: a loss is an error.
            supervisor: limits the restarts.
        """
        members = list(generators)
        if start is not None:
            for number, group in enumerate(generators):
                restart = partial(self._start_with_weights, number, start)
                members[number] = replace(group, start=restart, supervisor=supervisor)
        self.members = tuple(members)
        """The groups to call; a restart replaces the actors behind a group."""
        self.trainer = trainer
        self.store = store
        self.parity = parity
        self._drains = drains
        self._keeps_base = keeps_base
        self._base_model = RUN
        """A model with this base."""
        self._base_id: int | None = None
        """Checksum of the base that was pushed last."""
        self._bringing = asyncio.Lock()
        """Held while generators get the base."""
        self._expected: dict[int, asyncio.Future[list[Any]]] = {}
        """The trainer's logprobs of the text, by version, requested with the push."""
        self._pulling = asyncio.Lock()
        """Held during every pull, also by a generator that was started again."""
        self._version: int | None = None
        """Version that all members that are up hold, or are about to."""
        self._served = PullResult()

    @property
    def policy_version(self) -> int | None:
        """Version that the generators hold, or are about to pull; None before the first one."""
        return self._version

    def list_up(self) -> list[int]:
        """Return the numbers of the generators that can be called.

        Raises:
            RunError: a generator was lost too often.
        """
        # Also while others are up: a role that cannot be restarted ends the run.
        for member in self.members:
            if member.failure is not None:
                raise member.failure
        return [number for number, member in enumerate(self.members) if member.is_up]

    async def wait_until_one_is_up(self) -> None:
        """Wait for a generator, at most until a restart's deadline.

        Raises:
            RunError: a generator was lost too often.
        """
        while not self.list_up():
            restarts = [
                member.restarting for member in self.members if member.restarting is not None
            ]
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    async def push(self, *, model_id: str = RUN, version: int | None = None) -> int:
        """Push the weights of the run, or those of a model by id under the version given.

        Every trainer rank stores its shard; then the version can be pulled, and is returned. The
        trainer's logprobs of the parity text are requested at once, for the weights that are
        pushed. Of a model whose adapters are served beside its base they alone are pushed.
        """
        # Both calls are sent here and now, before anything else that the trainer is asked for. The
        # logprobs are awaited while the generators pull.
        push = asyncio.ensure_future(
            self.trainer.call(
                PolicyTrainer.push_model_state_dict,
                model_id=model_id,
                version=version,
                timeout="sync_s",
            )
        )
        expected = None
        if self.parity is not None:
            expected = asyncio.ensure_future(
                self.trainer.call(
                    PolicyTrainer.compute_logprobs, [self.parity.sample], timeout="train_s"
                )
            )
        try:
            pushed = self.store.announce(await push).version
        except BaseException:
            # Nobody will await the logprobs of a version that does not exist.
            if expected is not None:
                await _give_up(expected)
            raise
        if expected is not None:
            self._expected[pushed] = expected
        return pushed

    async def pull(self, policy_version: int, *, prunes: bool = True) -> PullResult:
        """Let all generators that are up, and those that join later, pull this version.

        Args:
            prunes: delete old versions then; False for a caller that deletes its versions itself.

        Raises:
            ActorLostError: the trainer is lost.
            RunError: a pull has failed, or a generator was lost too often.
        """
        # A generator that joins meanwhile waits, and pulls this version.
        async with self._pulling:
            up = [self.members[number] for number in self.list_up()]
            self._version = policy_version
            self._served, _ = await self._pull_from_living(policy_version, up)
        # If all were lost in the pull: a generator that joins has pulled this version.
        await self.wait_until_one_is_up()
        if prunes:
            await self.trainer.wait_while_alive(self.store.prune(), "pruning of old versions")
        return self._served

    async def load_adapter(self, version: int, *, generators: Sequence[ActorGroup]) -> None:
        """Let generators that hold its base load an adapter, for requests that name it.

        Raises:
            AdapterRoomError: it does not fit beside those that requests use.
            ActorLostError: the trainer or a generator is lost.
        """
        snapshot = self.store.snapshot(version)
        assert snapshot.adapter is not None, "whole weights are pulled"
        _, lost = await self.trainer.wait_while_alive(
            self._pull(snapshot, generators, is_newest=False), f"load of adapter {version}"
        )
        if lost:
            raise lost[0]

    async def serve_base(self, model_id: str) -> None:
        """Let all generators hold the base of a model whose adapters are served beside it.

        The model has to stay, as the base is pushed again after other weights were pulled.
        """
        async with self._pulling:
            up = [self.members[number] for number in self.list_up()]
            self._base_model = model_id
            await self.trainer.wait_while_alive(
                self.bring_base(up, base_id=self._base_id), "pull of the base"
            )

    async def _start_with_weights(
        self, number: int, start: Callable[[int], Awaitable[ActorGroup]]
    ) -> ActorGroup:
        """Start a lost generator again, and give it the weights that the others hold.

        The group gets requests as soon as it has taken over the actors that are returned.
        """
        group = await start(number)
        async with self._pulling:
            await group.call(VLLMGenerator.use_store, self.store, timeout="sync_s")
            lost: Sequence[ActorLostError] = ()
            if self._version is not None:
                try:
                    self._served, lost = await self._pull_from_living(self._version, [group])
                except ActorLostError as error:
                    # The trainer is lost: all generators wait for the next version.
                    logger.info("%s joins without weights: %s", group.name, error)
            if lost:
                raise lost[0]
            # The member has this group before another task runs: no await follows.
            return group

    @asynccontextmanager
    async def block_pulls(self) -> AsyncIterator[None]:
        """Prevent pulls while the store is replaced; forget all versions of the lost trainer."""
        async with self._pulling:
            self._version = None
            self._base_id = None
            # A version number may return with other weights: its logprobs must not.
            while self._expected:
                await _give_up(self._expected.popitem()[1])
            yield

    async def use_store(self) -> None:
        """Abort all requests and switch to the new store; call it in `block_pulls`."""
        await asyncio.gather(*(self._use_store(member) for member in self.members if member.is_up))

    async def _use_store(self, member: ActorGroup) -> None:
        mesh = member.mesh
        try:
            await member.call(VLLMGenerator.abort, None, needs_devices=False, timeout="close_s")
            await member.call(VLLMGenerator.use_store, self.store, timeout="sync_s")
        except ActorLostError as error:
            logger.info("%s", error)  # its replacement gets the store when it joins
        except ActorTimeoutError as error:
            # The generator hangs: restart it instead of the trainer.
            member.lose(ActorLostError(str(error), role=member.name), mesh=mesh)

    async def _pull_from_living(
        self, version: int, generators: Sequence[ActorGroup]
    ) -> tuple[PullResult, Sequence[ActorLostError]]:
        """See `pull_and_check`; raise ActorLostError if the trainer is lost meanwhile."""
        what, trainer = f"pull of version {version}", self.trainer
        try:
            # A dead trainer's memory gives nothing, which a generator would only notice at its
            # deadline.
            return await trainer.wait_while_alive(
                self.pull_and_check(version, generators=generators), what
            )
        except (ActorLostError, *PARITY_ERRORS):
            raise
        except RunError as error:
            # A generator may be the first to notice that the trainer is dead.
            dead = await trainer.wait_for_death(within_s=PEER_GRACE_S)
            if dead:
                message = f"{trainer.name}.{what} failed: {get_first_line(error)}"
                raise ActorLostError(message, role=trainer.name, ranks=dead) from error
            raise

    async def pull_and_check(
        self, version: int, *, generators: Sequence[ActorGroup]
    ) -> tuple[PullResult, Sequence[ActorLostError]]:
        """Let every generator pull the version, and check each.

        The checksums of its tensors must be those that were pushed (`check_sums`), and its logprobs
        of the parity text near the trainer's (`ParityText.check`).

        The errors of lost generators are returned: the others go on without them.

        Raises:
            WeightParityError: names generator, tensor and version.
            LogprobParityError: names generator and version.
            WeightStoreError: the version is deleted or given up.
        """
        snapshot = self.store.snapshot(version)
        try:
            if snapshot.adapter is not None:
                await self.bring_base(generators, base_id=snapshot.adapter.base_id)
            pulled, lost = await self._pull(snapshot, generators)
            started = now_s()
            diff, lost_later = await self._compare(snapshot, pulled)
            result = PullResult(
                parity_diff=diff,
                parity_s=now_s() - started,
                num_bytes=snapshot.num_bytes,
                merge_lost=snapshot.merge_lost,
            )
        except BaseException:
            # The version is still served: logprobs that are there are for the next generator that
            # pulls it.
            if version in self._expected and not self._expected[version].done():
                await _give_up(self._expected.pop(version))
            raise
        self._expected = {v: expected for v, expected in self._expected.items() if v >= version}
        return result, [*lost, *lost_later]

    async def _pull(
        self, snapshot: Snapshot, generators: Sequence[ActorGroup], *, is_newest: bool = True
    ) -> tuple[list[ActorGroup], list[ActorLostError]]:
        """Let generators pull a version; return those that have it, and the errors of lost ones."""
        calls = []
        for generator in generators:
            # Running completions end first, each within the limit of a whole call.
            waits = self._drains and snapshot.adapter is None
            calls.append(
                generator.call(
                    VLLMGenerator.pull_model_state_dict,
                    snapshot,
                    is_newest=is_newest,
                    pulls=snapshot.version,
                    timeout="sync_s",
                    extra_s=generator.timeouts.generate_s if waits else 0.0,
                )
            )
        answers, lost = await _gather_answers(generators, calls)
        pulled = {group.name: list(chain.from_iterable(ranks)) for group, ranks in answers}
        check_sums(version=snapshot.version, pushed=snapshot.sums, pulled=pulled)
        return [group for group, _ in answers], lost

    async def bring_base(self, generators: Sequence[ActorGroup], *, base_id: int | None) -> None:
        """Let generators that hold other weights pull the base with this checksum.

        It stays in the store only while some generator lacks it: a copy there is as large as the
        model. None: whatever base the trainer has.
        """
        # On shared devices a call that holds them must not wait here for one that waits for them.
        is_there = self._keeps_base and self._has_base(base_id)
        async with nullcontext() if is_there else self._bringing:
            if base_id is None:
                base_id = (await self._hold_base(None)).base_id
            answers, _ = await _gather_answers(
                generators,
                [
                    group.call(VLLMGenerator.get_base_id, needs_devices=False, timeout="sync_s")
                    for group in generators
                ],
            )
            # Asked rather than remembered: a generator forgets it in a restart or a sleep.
            lacking = [group for group, ids in answers if set(ids) != {base_id}]
            if lacking:
                await self._pull(await self._hold_base(base_id), lacking)
            if BASE in self.store.versions() and not self._keeps_base:
                await self.store.delete(BASE)

    async def _hold_base(self, base_id: int | None) -> Snapshot:
        """Return the base with this checksum, which the trainer pushes if the store lacks it."""
        if self._has_base(base_id):
            return self.store.snapshot(BASE)
        # A checkpoint brought another one, or a push of it failed half way.
        await self.store.delete(BASE)
        shards = await self.trainer.call(
            PolicyTrainer.push_model_state_dict,
            model_id=self._base_model,
            version=BASE,
            timeout="sync_s",
            extra_s=self.trainer.timeouts.train_s,  # It may be in the middle of a gradient.
        )
        snapshot = self.store.announce(shards)
        self._base_id = snapshot.base_id
        if base_id not in (None, snapshot.base_id):
            raise WeightParityError(
                f"the base's checksum is {snapshot.base_id}, and the adapter was trained on "
                f"{base_id}: the frozen weights of the trainer have changed since its push"
            )
        return snapshot

    def _has_base(self, base_id: int | None) -> bool:
        if BASE not in self.store.versions():
            return False
        return base_id in (None, self.store.snapshot(BASE).base_id)

    async def _compare(
        self, snapshot: Snapshot, generators: Sequence[ActorGroup]
    ) -> tuple[float | None, list[ActorLostError]]:
        """Return the largest difference of a generator's logprobs from the trainer's, in nats."""
        version = snapshot.version
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
        adapter = None if snapshot.adapter is None else version
        calls = [
            generator.call(
                VLLMGenerator.compute_logprobs,
                [self.parity.token_ids],
                adapter=adapter,
                timeout="train_s",
            )
            for generator in generators
        ]
        answers, lost = await _gather_answers(generators, calls)
        if not answers:
            return None, lost
        of_generators = {group.name: ranks[0][0] for group, ranks in answers}
        diff = self.parity.check(
            policy_version=version, expected_T=logprobs_T, of_generators=of_generators
        )
        return diff, lost


async def _gather_answers(
    groups: Sequence[ActorGroup], calls: Sequence[Coroutine[Any, Any, list[Any]]]
) -> tuple[list[tuple[ActorGroup, list[Any]]], list[ActorLostError]]:
    """Return the answers of calls to groups, each with its group, and the errors of lost groups."""

    async def answer_of(call: Coroutine[Any, Any, list[Any]]) -> list[Any] | ActorLostError:
        try:
            return await call
        except ActorLostError as error:
            return error

    results = await asyncio.gather(*map(answer_of, calls))
    answers: list[tuple[ActorGroup, list[Any]]] = []
    lost: list[ActorLostError] = []
    for group, result in zip(groups, results, strict=True):
        if isinstance(result, ActorLostError):
            lost.append(result)
        else:
            answers.append((group, result))
    return answers, lost


async def _give_up(answer: asyncio.Future[list[Any]]) -> None:
    """Cancel an answer that is no longer needed, and ignore its error."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
