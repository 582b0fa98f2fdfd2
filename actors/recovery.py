"""Restart of lost actors: generators one by one (`actors.pool`), reward processes and the trainer
as a whole.

relay restarts processes that died. It does not restart processes that hang or compute wrong
numbers; the run stops with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from actors.calls import ActorGroup, ActorLostError, first_line
from actors.parity import LogprobParityError
from actors.vllm.requests import EngineFailedError
from rl.utils.errors import RunError
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
    pass


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
        self.config = config
        self.in_background = in_background
        self._events = events
        self._now_s = now_s
        self._restarts: dict[str, list[float]] = {}
        """Times of the restarts, by role."""

    def count(
        self, role: str, *, reason: str, cause: BaseException | None = None, at_least: int = 1
    ) -> tuple[int, float]:
        """Count one more restart; return its number within the window and the pause before it.

        Args:
            at_least: number that this restart has at least, however long ago the others were:
                restarts without any progress between them do not expire.

        Raises:
            RestartsUsedUpError: names role, number, window and `reason`; raised from `cause`.
        """
        config, now_s = self.config, self._now_s()
        earlier = [at for at in self._restarts.get(role, ()) if now_s - at < config.window_s]
        if (num_earlier := max(len(earlier), at_least - 1)) >= config.max_restarts:
            raise RestartsUsedUpError(
                f"{role} is lost again, after {num_earlier} restarts (recovery.max_restarts="
                f"{config.max_restarts}, recovery.window_s={config.window_s:g}); the last reason: "
                f"{reason}"
            ) from cause
        self._restarts[role] = [*earlier, now_s]
        doublings = min(len(earlier) - 1, 60)
        return len(earlier) + 1, min(
            config.pause_s * 2**doublings, config.max_pause_s
        ) if earlier else 0.0

    async def restart(
        self,
        role: str,
        *,
        reason: str,
        start: Callable[[], Awaitable[T]],
        cause: BaseException | None = None,
        at_least: int = 1,
    ) -> T:
        """Return the result of `start`, which is called again after pauses if the role is lost
        during it.

        `start` has deadlines of its own. `cause` and `at_least` are those of `count`, for the first
        call.

        Raises:
            RestartsUsedUpError: the role was lost too often.
            LogprobParityError, WeightParityError: see `PARITY_ERRORS`.
        """
        lost_at = self._now_s()
        for counted in itertools.count(at_least):
            number, pause_s = self.count(role, reason=reason, cause=cause, at_least=counted)
            again = f"starting it again in {pause_s:g} s" if pause_s else "starting it again"
            logger.warning(
                "%s is lost: %s; %s (%d of %d)",
                role,
                reason,
                again,
                number,
                self.config.max_restarts,
            )
            self._events("lost", role=role, reason=reason)
            await asyncio.sleep(pause_s)
            try:
                started = await start()
            except PARITY_ERRORS:
                raise
            except RunError as error:
                logger.info("%s was not started", role, exc_info=True)
                reason, cause = first_line(error), error
                continue
            after_s = self._now_s() - lost_at
            logger.warning("%s is restarted after %.1f s", role, after_s)
            self._events("recovered", role=role, after_s=round(after_s, 2))
            return started
        raise AssertionError("unreachable")


class Role:
    """A `CallGroup` of one role's current actors, which are restarted in the background when they
    are lost.
    """

    def __init__(
        self,
        group: ActorGroup,
        *,
        start: Callable[[], Awaitable[ActorGroup]] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Without `start` and `supervisor` the actors are not restarted here, and a loss is an
        error.
        """
        self.group = group
        self.failure: RunError | None = None
        """Error after which the role is not restarted here."""
        self.restarting: asyncio.Task[None] | None = None
        self._start = start
        self._supervisor = supervisor

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def timeouts(self) -> Timeouts:
        return self.group.timeouts

    @property
    def is_up(self) -> bool:
        return self.restarting is None and self.failure is None

    def replace(self, group: ActorGroup) -> None:
        self.group, self.failure = group, None

    def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Call the current actors, see `ActorGroup.call`; a failed engine counts as lost.

        Raises:
            ActorLostError: the actors are lost, or are being restarted.
        """
        if self.restarting is not None:
            return self._refuse(endpoint)
        return self._answer(self.group, self.group.call(endpoint, *args, extra_s=extra_s, **kwargs))

    async def _answer(self, group: ActorGroup, answer: Coroutine[Any, Any, list[Any]]) -> list[Any]:
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
        raise ActorLostError(
            f"{self.name}.{endpoint} failed: it is being started again", role=self.name
        )

    async def current(self) -> ActorGroup:
        """Return the current actors, after a restart that is under way; raise `failure`, if there
        is one.
        """
        while self.restarting is not None:
            await asyncio.wait({self.restarting})
        if self.failure is not None:
            raise self.failure
        return self.group

    def lose(self, group: ActorGroup, error: ActorLostError) -> None:
        """Restart the role because `group` is lost, unless that is known already.

        Raises:
            ActorLostError: `error`, if the role is not restarted.
        """
        if group is not self.group or not self.is_up:
            return
        if (
            self._start is None
            or self._supervisor is None
            or not self._supervisor.config.max_restarts
        ):
            self.failure = error
            raise error
        restart = self._restart(self._start, self._supervisor, error=error)
        self.restarting = self._supervisor.in_background(restart, name=f"restart of {self.name}")

    async def _restart(
        self,
        start: Callable[[], Awaitable[ActorGroup]],
        supervisor: Supervisor,
        *,
        error: ActorLostError,
    ) -> None:
        try:
            self.group = await supervisor.restart(
                self.name, reason=first_line(error), start=start, cause=error
            )
        except RunError as failure:
            self.failure = failure
        except BaseException as failure:
            # Also if it is cancelled: no caller may wait for this role any longer.
            self.failure = RunError(
                f"{self.name} was not started again: {type(failure).__name__}: {failure}"
            )
            self.failure.__cause__ = failure
            raise
        finally:
            self.restarting = None
