"""Calls to actors: every wait has a deadline, and errors name the actor and the endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from actors.launch.compat import SupervisionError
from rl.utils.errors import RunError, list_causes
from rl.utils.processes import signal_name

REPORT_GRACE_S = 3.0
"""Time for Monarch to report the cause of a process's death; on a busy machine it needs up to 30 s.
"""
PEER_GRACE_S = 1.0
"""Time until a process is seen dead whose peers have already lost it."""
LOOK_EVERY_S = 0.5
"""Interval at which processes are looked at."""


class ActorTimeoutError(RunError, TimeoutError):
    """No answer within a deadline, from an actor of `role` where that is known."""

    def __init__(self, message: str, *, role: str = "") -> None:
        super().__init__(message)
        self.role = role


class ActorCallError(RunError):
    """An actor's endpoint raised, or its process ended."""


class ActorLostError(ActorCallError):
    """Actors that cannot go on, so that the group has to be restarted.

    `ranks` are those of dead processes, where they are known. `is_dead` is False where a process
    has only not answered, as far as anybody knows.
    """

    def __init__(
        self, message: str, *, role: str, ranks: Sequence[int] = (), is_dead: bool = False
    ) -> None:
        super().__init__(message)
        self.role = role
        self.ranks = tuple(ranks)
        self.is_dead = is_dead or bool(ranks)


@asynccontextmanager
async def deadline(
    timeout_s: float, what: str, *, option: str = "", role: str = ""
) -> AsyncIterator[None]:
    """Limit the block to `timeout_s`; its errors name what was waited for, and the option.

    Example:
        >>> async with deadline(600.0, "starting role 'trainer'", option="timeouts.start_s"):
        ...     await answers
        ActorTimeoutError: starting role 'trainer': no answer within 600 s (timeouts.start_s)

    Raises:
        ActorTimeoutError: the time is over.
        ActorLostError: a process of the role, if it is given, has ended.
        ActorCallError: a process has ended, or could not be started.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        limit = f"{timeout_s:g} s ({option})" if option else f"{timeout_s:g} s"
        raise ActorTimeoutError(f"{what}: no answer within {limit}", role=role) from error
    except SupervisionError as error:
        # Monarch also raises it for a stopped process, of which no end is known.
        is_dead = end_of_process(str(error)) is not None
        raise _make_error(f"{what}: {describe_loss(error)}", role=role, is_dead=is_dead) from error
    except ValueError as error:  # Monarch's, if a host does not start processes
        end = end_of_process(str(error))
        if end is None:
            raise ActorCallError(f"{what}: {error}") from error
        raise _make_error(f"{what}: a process is dead: {end}", role=role, is_dead=True) from error


def _make_error(message: str, *, role: str, is_dead: bool) -> ActorCallError:
    return ActorLostError(message, role=role, is_dead=is_dead) if role else ActorCallError(message)


def find_mesh_index(mesh: Any, rank: int) -> dict[str, int]:
    """Return the index of a rank in each dimension of a mesh, to slice it."""
    index, rest = {}, rank
    # The last dimension varies fastest: ranks of a host are neighbours.
    for dim, size in reversed(mesh.sizes.items()):
        rest, index[dim] = divmod(rest, size)
    assert not rest, f"there are {mesh.size()} ranks, there is no rank {rank}"
    return index


def is_caused_by_timeout(error: BaseException) -> bool:
    """Return whether a timeout caused an error, here or in an actor."""
    return any(
        isinstance(cause, TimeoutError)
        or isinstance(getattr(cause, "exception", None), TimeoutError)
        for cause in list_causes(error)
    )


def may_hang(role: str, *, after: BaseException) -> bool:
    """Return whether this role may no longer answer, so that calling it would be useless.

    This is assumed after every deadline except that of another role's answer: ranks that wait for
    each other, and a weight store in the trainer's processes, do not show which process holds them
    up.
    """
    for cause in list_causes(after):
        if isinstance(cause, ActorTimeoutError) and cause.role:
            return cause.role == role
    return is_caused_by_timeout(after)


def end_of_process(report: str) -> str | None:
    """Return how a process ended, from a text of Monarch; None if the text does not say so.

    Example:
        >>> end_of_process("the process this actor was running on failed: Killed(sig=9)")
        'killed by SIGKILL'
    """
    # Monarch has no field for it: these are its words in several kinds of reports.
    killed = re.search(r"Killed\W*(?:signal|sig)\W*(\d+)", report)
    if killed:
        return f"killed by {signal_name(int(killed[1]))}"
    exited = re.search(r"(?:Stopped|Exited)\W*(?:exit_code|exit|code|status)\W*?(-?\d+)", report)
    if exited:
        return f"it ended with status {exited[1]}"
    return None


def describe_loss(error: SupervisionError) -> str:
    """Return which rank is dead and why, from Monarch's report."""
    report = str(error)
    # The rank's coordinates on the mesh: {'procs': 1/2}, or {'hosts': 0/2, 'procs': 1/2}.
    place = re.search(r"\{(?:'hosts': (\d+)/(\d+), )?'procs': (\d+)/(\d+)\}", report)
    rank = "a rank"
    if place:
        host, num_hosts, proc, num_procs = (int(number or 0) for number in place.groups())
        rank = f"rank {host * num_procs + proc} of {max(1, num_hosts) * num_procs}"
    return f"{rank} is dead: {end_of_process(report) or ' '.join(report.split())}"


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message; a remote traceback may follow it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
