"""Restart of lost actors: generators one by one, reward processes and the trainer as a whole.

relay restarts processes that died. It does not restart processes that hang or compute wrong numbers; the run
stops with an error.

A generator is lost when one of its processes ends or its engine fails, which shows in a call or in a look at
the processes twice a second. It is restarted in the background, pulls the version that is served, is checked
as after any pull, and only then receives prompts. No caller waits for it while another generator is up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actors.calls import LOOK_EVERY_S, PEER_GRACE_S, ActorLostError, ActorTimeoutError, Group, first_line
from actors.parity import LogprobParityError, ParityCheck
from actors.vllm.requests import EngineFailedError
from rl.types import ServeResult
from rl.utils.errors import RunError
from rl.weights.store import WeightStore
from rl.weights.types import WeightParityError

if TYPE_CHECKING:
    from actors.config import RecoveryConfig, Timeouts

logger = logging.getLogger(__name__)

T = TypeVar("T")
AddEvent = Callable[..., None]
"""Function that records an event, given its name and its fields by keyword."""
InBackground = Callable[..., "asyncio.Task[None]"]

PARITY_ERRORS = (LogprobParityError, WeightParityError)
"""Errors that a restart would not cure: the new process would compute the same wrong numbers."""


def no_event(event: str, /, **fields: Any) -> None:
    """Record nothing."""


class RestartsUsedUpError(RunError):
    """A role is lost more often than it may be restarted."""


class Supervisor:
    """Restarts of lost roles, within limits, recorded in the log and in the run's events."""

    def __init__(
        self,
        config: RecoveryConfig,
        *,
        in_background: InBackground = asyncio.create_task,
        events: AddEvent = no_event,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_background` runs a restart beside the calls: `Launcher.in_background`."""
        self.config = config
        self.in_background = in_background
        self._events = events
        self._now_s = now_s
        self._restarts: dict[str, list[float]] = {}
        """Times of the restarts, by role."""

    def count(self, role: str, *, reason: str, at_least: int = 1) -> tuple[int, float]:
        """Count one more restart; return its number within the window and the pause before it.

        Args:
            at_least: number that this restart has at least, however long ago the others were: restarts
                without any progress between them do not expire.

        Raises:
            RestartsUsedUpError: names role, number, window and `reason`.
        """
        config, now_s = self.config, self._now_s()
        earlier = [at for at in self._restarts.get(role, ()) if now_s - at < config.window_s]
        num_earlier, within = len(earlier), f"within {config.window_s:g} s"
        if at_least - 1 > num_earlier:
            num_earlier, within = at_least - 1, "without progress"
        if num_earlier >= config.max_restarts:
            raise RestartsUsedUpError(
                f"{role} is lost again, after {num_earlier} restarts {within} "
                f"(recovery.max_restarts={config.max_restarts}, recovery.window_s="
                f"{config.window_s:g}); the last reason: {reason}"
            )
        self._restarts[role] = [*earlier, now_s]
        doublings = min(len(earlier) - 1, 60)
        return len(earlier) + 1, min(config.pause_s * 2**doublings, config.max_pause_s) if earlier else 0.0

    async def restart(
        self,
        role: str,
        *,
        reason: str,
        start: Callable[[], Awaitable[T]],
        done: str = "works again",
        at_least: int = 1,
    ) -> T:
        """Return the result of `start`, which is called again after pauses if the role is lost during it.

        `start` has deadlines of its own. `at_least` is the one of `count`, for the first call.

        Raises:
            RestartsUsedUpError: the role was lost too often.
            LogprobParityError, WeightParityError: the role holds or uses wrong weights.
        """
        lost_at = self._now_s()
        for counted in itertools.count(at_least):
            number, pause_s = self.count(role, reason=reason, at_least=counted)
            pause = f" in {pause_s:g} s" if pause_s else ""
            limit = self.config.max_restarts
            logger.warning(
                "%s is lost: %s; starting it again%s (%d of %d)", role, reason, pause, number, limit
            )
            self._events("lost", role=role, reason=reason)
            await asyncio.sleep(pause_s)
            try:
                started = await start()
            except PARITY_ERRORS:
                raise
            except RunError as error:
                logger.info("%s was not started", role, exc_info=True)
                reason = first_line(error)
                continue
            after_s = self._now_s() - lost_at
            logger.warning("%s %s after %.1f s", role, done, after_s)
            self._events("recovered", role=role, after_s=round(after_s, 2))
            return started
        raise AssertionError("unreachable")


GroupT = TypeVar("GroupT", bound=Group)


class Role(Generic[GroupT]):
    """A `Group` of one role's current actors, which are restarted in the background when they are lost."""

    def __init__(
        self,
        group: GroupT,
        *,
        start: Callable[[], Awaitable[GroupT]] | None = None,
        supervisor: Supervisor | None = None,
        done: str = "works again",
    ) -> None:
        """Without `start` and `supervisor` the actors are not restarted here, and a loss is an error."""
        self.group = group
        self.failure: RunError | None = None
        """Error of a restart that failed for good."""
        self.restarting: asyncio.Task[None] | None = None
        self._start = start
        self._supervisor = supervisor
        self._done = done

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def timeouts(self) -> Timeouts:
        return self.group.timeouts

    @property
    def is_up(self) -> bool:
        return self.restarting is None and self.failure is None

    def call(
        self, endpoint: str, *args: Any, limit_s: float, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Call the current actors, see `ActorGroup.call`; a failed engine counts as lost.

        Raises:
            ActorLostError: the actors are lost, or are being restarted.
        """
        if self.restarting is not None:
            return self._refuse(endpoint)
        return self._answer(self.group, self.group.call(endpoint, *args, limit_s=limit_s, **kwargs))

    async def _answer(self, group: GroupT, answer: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        try:
            return await answer
        except ActorLostError as error:
            self.lose(group, error)
            raise
        except EngineFailedError as error:
            lost = ActorLostError(f"{self.name}: {error}", role=self.name)
            self.lose(group, lost)
            raise lost from error

    async def _refuse(self, endpoint: str) -> list[Any]:
        raise ActorLostError(f"{self.name}.{endpoint} failed: it is being started again", role=self.name)

    async def current(self) -> GroupT:
        """Return the current actors, after a restart that is under way.

        Raises:
            RunError: the actors are lost and not restarted any more.
        """
        while self.restarting is not None:
            await asyncio.wait({self.restarting})
        if self.failure is not None:
            raise self.failure
        return self.group

    def lose(self, group: GroupT, error: ActorLostError) -> None:
        """Restart the role because `group` is lost, unless that is known already.

        Raises:
            ActorLostError: `error`, if the role is not restarted.
        """
        if group is not self.group or not self.is_up:
            return
        if self._start is None or self._supervisor is None or not self._supervisor.config.max_restarts:
            raise error
        restart = self._restart(self._start, self._supervisor, reason=first_line(error))
        self.restarting = self._supervisor.in_background(restart, name=f"restart of {self.name}")

    async def _restart(
        self, start: Callable[[], Awaitable[GroupT]], supervisor: Supervisor, *, reason: str
    ) -> None:
        try:
            self.group = await supervisor.restart(self.name, reason=reason, start=start, done=self._done)
        except asyncio.CancelledError:
            # Also if an awaited task was cancelled: no caller may wait for this role any longer.
            self.failure = RunError(f"{self.name} is not started again any more")
            raise
        except RunError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  (raised in the next caller that needs the role)
            self.failure = RunError(
                f"{self.name} was not started again: {type(error).__name__}: {first_line(error)}"
            )
            self.failure.__cause__ = error
        finally:
            self.restarting = None


class GeneratorPool:
    """The generators of a run, each replaced when it is lost while the others go on.

        pool = GeneratorPool(generators, start=start, supervisor=supervisor, ...)
        pool.watch()
        generator = Router([GeneratorClient(member) for member in pool.members], pool=pool)
        await pool.serve(version)

    `serve` and a generator that joins exclude each other, so that all generators that are up hold the same
    version.
    """

    def __init__(
        self,
        generators: Sequence[Any],
        *,
        start: Callable[[int], Awaitable[Any]],
        supervisor: Supervisor,
        trainer: Role[Any],
        store: WeightStore,
        check: ParityCheck,
    ) -> None:
        """
        Args:
            generators: `ActorGroup`s.
            start: ends what is left of the generator of this number and starts it again, without weights.
            trainer: the pushing side, whose processes hold the store's volumes.
        """
        self.members: Sequence[Role[Any]] = tuple(
            Role(group, start=partial(self._restart, number), supervisor=supervisor, done="serves again")
            for number, group in enumerate(generators)
        )
        self.trainer = trainer
        self._start = start
        self._supervisor = supervisor
        self._store = store
        self._check = check
        self._pulling = asyncio.Lock()
        """Held during every pull: by `serve` or by a generator that joins."""
        self._version: int | None = None
        """Version that all members that are up hold, or are about to."""
        self._served = ServeResult()
        """Result of the last checked pull."""
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Start to look for dead generators also while no call is made."""
        self._watching = self._supervisor.in_background(self._watch(), name="watch over the generators")

    async def _watch(self) -> None:
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

    async def serve(self, version: int) -> ServeResult:
        """Let all generators that are up, and those that join later, pull this version.

        Raises:
            ActorLostError: the trainer is lost.
            RunError: a pull has failed, or a generator was lost too often.
        """
        async with self._pulling:
            up = [self.members[number] for number in self.up()]
            self._version = version
            self._served, _ = await self._pull(version, up)
        # If all were lost in the pull: a generator that joins has pulled this version.
        await self.wait_until_one_is_up()
        return self._served

    def close(self) -> Sequence[Group]:
        """Stop replacing generators and return those that are up."""
        up = [member.group for member in self.members if member.is_up]
        for task in (self._watching, *(member.restarting for member in self.members)):
            if task is not None:
                task.cancel()
        return up

    @asynccontextmanager
    async def without_weights(self) -> AsyncIterator[None]:
        """Prevent pulls while the store is replaced, and forget the version that was served."""
        async with self._pulling:
            self._version = None
            yield

    async def use_store(self) -> None:
        """Abort all requests and switch to the new store; call it in `without_weights`."""
        await asyncio.gather(*(self._use_store(member) for member in self.members if member.is_up))

    async def _use_store(self, member: Role[Any]) -> None:
        group, timeouts = member.group, member.timeouts
        try:
            await member.call("abort", None, limit_s=timeouts.close_s)
            await member.call("use_store", self._store, limit_s=timeouts.sync_s)
        except ActorLostError as error:
            logger.info("%s", error)  # its replacement gets the store when it joins
        except ActorTimeoutError as error:
            # The generator hangs: restart it instead of the trainer.
            member.lose(group, ActorLostError(str(error), role=member.name))

    async def _pull(
        self, version: int, generators: Sequence[Group]
    ) -> tuple[ServeResult, Sequence[ActorLostError]]:
        """Return the result and the errors of generators that were lost; raise if the trainer is lost."""
        pull, what = self._check.pull(version, generators=generators), f"pull of version {version}"
        trainer = self.trainer.group
        try:
            # A dead trainer's memory gives nothing, which a generator would only notice at its deadline.
            served: tuple[ServeResult, Sequence[ActorLostError]] = await trainer.while_alive(pull, what)
            return served
        except (ActorLostError, *PARITY_ERRORS):
            raise
        except RunError as error:
            # A generator may be the first to notice that the trainer is dead.
            if dead := await trainer.seen_dead(PEER_GRACE_S):
                message = f"{trainer.name}.{what} failed: {first_line(error)}"
                raise ActorLostError(message, role=trainer.name, ranks=dead) from error
            raise

    async def _restart(self, number: int) -> Any:
        """Start a generator again, with the weights that the other generators hold."""
        group = await self._start(number)
        joining = Role(group)
        async with self._pulling:
            await joining.call("use_store", self._store, limit_s=joining.timeouts.sync_s)
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
