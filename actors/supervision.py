"""What becomes of a run that loses a process: how often a role is started again, and how it is told.

supervisor = Supervisor(RecoveryConfig(), events=events.add)
group = await supervisor.again("generator_0", reason="rank 0 of 1 is dead", start=start)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.canary import CanaryError
from rl.errors import RunError
from rl.weights.errors import WeightCanaryError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AddEvent = Callable[..., None]
"""Takes an event's name, and what there is to say of it by keyword."""

WRONG_WEIGHTS = (CanaryError, WeightCanaryError)
"""No loss: whoever was started anew would compute as wrongly."""


def no_event(event: str, /, **fields: Any) -> None:
    """Where nobody keeps them."""


@dataclass(kw_only=True, slots=True)
class RecoveryConfig:
    """How often lost processes are started again."""

    max_restarts: int = 3
    """How often each role (the trainer, a generator, the reward processes) may be started again within
    `window_s`; a loss beyond that ends the run. 0: the first lost process ends it."""
    window_s: float = 3600.0
    """Restarts of longer ago are not counted."""
    pause_s: float = 1.0
    """Wait before the second start of a role within `window_s`, doubled before each further one; the first
    is at once."""
    max_pause_s: float = 60.0
    """Longest such wait."""
    spare_generators: int = 0
    """Generators' processes that have imported all they need and wait to take a lost one's place; each has
    the memory of a process with vllm. Only with launch.hosts='this', and without launch.share_gpus."""

    def __post_init__(self) -> None:
        for name in ("max_restarts", "spare_generators"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")
        if not self.window_s > 0:
            raise ValueError(f"window_s={self.window_s}: must be above 0")
        if not self.pause_s >= 0:
            raise ValueError(f"pause_s={self.pause_s}: must be at least 0")
        if not self.max_pause_s >= self.pause_s:
            raise ValueError(f"max_pause_s={self.max_pause_s}: must be at least pause_s={self.pause_s:g}")
        if self.spare_generators and not self.max_restarts:
            raise ValueError(
                f"spare_generators={self.spare_generators} with max_restarts=0: no spare would ever be "
                "used, as nothing is started again"
            )


class RestartsUsedUpError(RunError):
    """A role is lost more often than it may be started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """One that may be made."""

    number: int
    """Within the window, from 1."""
    pause_s: float
    """Wait before it."""


class Restarts:
    """Counts the restarts of each role."""

    def __init__(self, config: RecoveryConfig, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now_s = now_s
        self._made: dict[str, list[float]] = {}
        """When, by role."""

    def next(self, role: str, *, reason: str, at_least: int = 1) -> Restart:
        """Count one more. `at_least` so many are counted with it, however long ago the others were, as they
        came to nothing.

        Raises:
            RestartsUsedUpError: names role, number, window and `reason`.
        """
        config, now_s = self._config, self._now_s()
        made = [at for at in self._made.get(role, ()) if now_s - at < config.window_s]
        num_made, within = len(made), f"within {config.window_s:g} s"
        if at_least - 1 > num_made:
            num_made, within = at_least - 1, "that came to nothing"
        if num_made >= config.max_restarts:
            raise RestartsUsedUpError(
                f"{role} is lost once more, after {num_made} restarts {within} "
                f"(recovery.max_restarts={config.max_restarts}, recovery.window_s="
                f"{config.window_s:g}); the last reason: {reason}"
            )
        self._made[role] = [*made, now_s]
        pause_s = min(config.pause_s * 2 ** min(len(made) - 1, 60), config.max_pause_s) if made else 0.0
        return Restart(number=len(made) + 1, pause_s=pause_s)


class Supervisor:
    """Starts lost roles again, and tells of it in the log and in the run's events."""

    def __init__(
        self,
        config: RecoveryConfig,
        *,
        events: AddEvent = no_event,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._events = events
        self._now_s = now_s
        self._restarts = Restarts(config, now_s=now_s)

    async def again(
        self,
        role: str,
        *,
        reason: str,
        start: Callable[[], Awaitable[T]],
        done: str = "works again",
        at_least: int = 1,
    ) -> T:
        """What `start` gives, which is called anew after pauses as long as the role is lost in its start.

        `start` has deadlines of its own. `at_least` is as of `Restarts.next`, for its first call.

        Raises:
            RestartsUsedUpError: it was lost too often.
            CanaryError, WeightCanaryError: it holds or uses other weights than it should.
        """
        lost_at = self._now_s()
        for counted in itertools.count(at_least):
            restart = self._restarts.next(role, reason=reason, at_least=counted)
            logger.warning(
                "%s is lost: %s; starting it again%s (%d of %d)",
                role,
                reason,
                f" in {restart.pause_s:g} s" if restart.pause_s else "",
                restart.number,
                self.config.max_restarts,
            )
            self._events("lost", role=role, reason=reason)
            await asyncio.sleep(restart.pause_s)
            try:
                started = await start()
            except WRONG_WEIGHTS:
                raise
            except RunError as error:
                logger.info("%s was not started", role, exc_info=True)
                reason = first_line(error)
                continue
            after_s = self._now_s() - lost_at
            logger.warning("%s %s after %.1f s", role, done, after_s)
            self._events("recovered", role=role, after_s=round(after_s, 2))
            return started
        raise AssertionError("counted to the end")


def first_line(error: BaseException) -> str:
    """Of its message: what follows is a remote traceback, which is in the log."""
    return (str(error).splitlines() or [type(error).__name__])[0]
