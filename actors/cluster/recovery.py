"""Limits of restarts: the number of restarts of each role, and the pauses before them.

relay restarts processes that died: generators one by one (`actors.cluster.publisher`), reward
processes and the trainer as a whole. It does not restart processes that hang or compute wrong
numbers; the run stops with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from actors.cluster.parity import LogprobParityError
from actors.config import RecoveryConfig
from actors.launch.calls import get_first_line
from rl.utils.errors import RunError
from rl.weights.types import WeightParityError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AddEvent = Callable[..., None]
"""Function that records an event, given its name and its fields by keyword."""
InBackground = Callable[..., "asyncio.Task[None]"]

PARITY_ERRORS = (LogprobParityError, WeightParityError)
"""Errors that a restart would not cure: the new process would compute the same wrong numbers."""


def ignore_event(event: str, /, **fields: Any) -> None:
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
        events: AddEvent = ignore_event,
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
        # A long run may lose a process now and then; many losses in an hour have one cause.
        earlier = [at for at in self._restarts.get(role, ()) if now_s - at < config.window_s]
        num_earlier = max(len(earlier), at_least - 1)
        if num_earlier >= config.max_restarts:
            raise RestartsUsedUpError(
                f"{role} is lost again, after {num_earlier} restarts (recovery.max_restarts="
                f"{config.max_restarts}, recovery.window_s={config.window_s:g}); the last reason: "
                f"{reason}"
            ) from cause

        self._restarts[role] = [*earlier, now_s]
        if not earlier:
            return 1, 0.0  # Most losses happen once: the first restart does not wait.
        doublings = min(len(earlier) - 1, 60)  # Larger powers would overflow a float.
        return len(earlier) + 1, min(config.pause_s * 2**doublings, config.max_pause_s)

    async def restart(
        self,
        role: str,
        *,
        reason: str,
        start: Callable[[], Awaitable[T]],
        cause: BaseException | None = None,
        at_least: int = 1,
    ) -> T:
        """Return the result of `start`; call it again, after pauses, if the role is lost again.

        `start` has deadlines of its own. `cause` and `at_least` are those of `count`, for the first
        call.

        Raises:
            RestartsUsedUpError: the role was lost too often.
            LogprobParityError, WeightParityError: see `PARITY_ERRORS`.
        """
        lost_at = self._now_s()
        # Each failed start counts as another loss, also where the starts outlast the window.
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
                raise  # The run would go on with wrong numbers.
            except RunError as error:
                logger.info("%s was not started", role, exc_info=True)
                reason, cause = get_first_line(error), error
                continue
            after_s = self._now_s() - lost_at
            logger.warning("%s is restarted after %.1f s", role, after_s)
            self._events("recovered", role=role, after_s=round(after_s, 2))
            return started
        raise AssertionError("unreachable")
