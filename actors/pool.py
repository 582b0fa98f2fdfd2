"""The generators of a run: the way of weights to them, and their replacement when they are lost.

    pool = GeneratorPool([Role(group, start=...), ...], trainer=trainer, store=store, check=check)
    generator = Router([GeneratorClient(member) for member in pool.members], pool=pool)
    await pool.serve(await pool.push())

A generator is lost when one of its processes ends or its engine fails, which shows in a call or in a look at
the processes twice a second. It is restarted in the background, pulls the version that is served, is checked
as after any pull, and only then receives prompts. No caller waits for it while another generator is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from actors.calls import (
    LOOK_EVERY_S,
    PEER_GRACE_S,
    ActorGroup,
    ActorLostError,
    ActorTimeoutError,
    Group,
    first_line,
)
from actors.parity import ParityCheck, give_up
from actors.recovery import PARITY_ERRORS, Role
from rl.training.models import RUN
from rl.types import ServeResult
from rl.utils.errors import RunError
from rl.weights.store import WeightStore
from rl.weights.types import VersionNotFoundError

logger = logging.getLogger(__name__)


class GeneratorPool:
    """A `Publisher`: trainer ranks push, every generator pulls and is checked.

    Pulls exclude each other, so that all generators that are up hold the same version.
    """

    def __init__(
        self, members: Sequence[Role], *, trainer: Role, store: WeightStore, check: ParityCheck
    ) -> None:
        """
        Args:
            members: the generators. Their restarts end with `join`.
            trainer: the pushing side, whose processes hold the store's volumes.
        """
        self.members = tuple(members)
        self.trainer = trainer
        self.store = store
        self.check = check
        self._pulling = asyncio.Lock()
        """Held during every pull: by `serve` or by a generator that joins."""
        self._version: int | None = None
        """Version that all members that are up hold, or are about to."""
        self._served = ServeResult()
        """Result of the last checked pull."""

    async def watch(self) -> None:
        """Look for dead generators also while no call is made, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for member in self.members:
                if member.is_up and (dead := member.group.dead()):
                    message = f"rank {', '.join(map(str, dead))} is dead: its process ended"
                    member.lose(member.group, ActorLostError(message, role=member.name, ranks=dead))

    def up(self) -> list[int]:
        """Return the numbers of the generators that can be called.

        Raises:
            RunError: a generator was lost too often.
        """
        for member in self.members:
            if member.failure is not None:
                raise member.failure
        return [number for number, member in enumerate(self.members) if member.is_up]

    async def wait_until_one_is_up(self) -> None:
        """Wait for a generator; restarts are limited in number and have deadlines.

        Raises:
            RunError: a generator was lost too often.
        """
        while not self.up():
            restarts = [member.restarting for member in self.members if member.restarting is not None]
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    async def push(self, *, model_id: str = RUN, version: int | None = None) -> int:
        """Push the weights of the run, or those of a model by id under the version given."""
        # Both calls are sent here and now, before anything else that the trainer is asked for. `serve` awaits
        # the logprobs, while the generators pull.
        named: dict[str, Any] = {} if model_id == RUN else {"model_id": model_id, "version": version}
        push = asyncio.ensure_future(self.trainer.call("push_model_state_dict", **named))
        expected = None
        if (text := self.check.text) is not None:
            expected = asyncio.ensure_future(self.trainer.call("compute_logprobs", [text.sample]))
        try:
            pushes = await push
            pushed: int = pushes[0].policy_version
            trainer = self.trainer.group
            await trainer.while_alive(self.store.announce(pushed), f"announcing version {pushed}")
        except BaseException:
            if expected is not None:
                await give_up(expected)
            raise
        self.check.expect(pushed, sums=[s for push in pushes for s in push.sums], expected=expected)
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
            self._served, _ = await self._pull(policy_version, up)
        # If all were lost in the pull: a generator that joins has pulled this version.
        await self.wait_until_one_is_up()
        if not self.check.keeps:
            await self.trainer.group.while_alive(self.store.prune(), "pruning of old versions")
        return self._served

    async def forget(self, version: int) -> None:
        """Drop a version that is kept; without effect on one that was not pushed."""
        self.check.drop(version)
        with suppress(VersionNotFoundError):
            await self.store.delete(version)

    async def join(self, group: ActorGroup) -> ActorGroup:
        """Give a restarted generator the weights that the other generators hold, and return it."""
        joining = Role(group)
        async with self._pulling:
            await joining.call("use_store", self.store)
            lost: Sequence[ActorLostError] = ()
            if self._version is not None:
                try:
                    self._served, lost = await self._pull(self._version, [joining])
                except ActorLostError as error:
                    # The trainer is lost: all generators wait for the next version.
                    logger.info("%s joins without weights: %s", joining.name, error)
            if lost:
                raise lost[0]
            # The member has this group before another task runs: no await follows.
            return group

    @asynccontextmanager
    async def without_weights(self) -> AsyncIterator[None]:
        """Prevent pulls while the store is replaced, and forget the version that was served."""
        async with self._pulling:
            self._version = None
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

    async def _pull(
        self, version: int, generators: Sequence[Group]
    ) -> tuple[ServeResult, Sequence[ActorLostError]]:
        """Return the result and the errors of generators that were lost; raise if the trainer is lost."""
        pull, what = self.check.pull(version, generators=generators), f"pull of version {version}"
        trainer = self.trainer.group
        try:
            # A dead trainer's memory gives nothing, which a generator would only notice at its deadline.
            return await trainer.while_alive(pull, what)
        except (ActorLostError, *PARITY_ERRORS):
            raise
        except RunError as error:
            # A generator may be the first to notice that the trainer is dead.
            if dead := await trainer.seen_dead(PEER_GRACE_S):
                message = f"{trainer.name}.{what} failed: {first_line(error)}"
                raise ActorLostError(message, role=trainer.name, ranks=dead) from error
            raise
