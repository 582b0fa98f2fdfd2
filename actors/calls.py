"""Calls to actors: every wait has a deadline, and errors name the actor and the endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from monarch.actor import ActorError

from actors.compat import SupervisionError
from actors.deaths import death_watch
from rl.observability.spans import span
from rl.utils.errors import RunError, causes
from rl.utils.processes import ProcessId, is_alive, signal_name

if TYPE_CHECKING:
    from actors.config import Timeouts

T = TypeVar("T")

REPORT_GRACE_S = 3.0
"""Time for Monarch to report the cause of a process's death; on a busy machine it needs up to 30 s.
"""
PEER_GRACE_S = 1.0
"""Time until a process is seen dead whose peers have already lost it."""
TIMEOUT_OF_ENDPOINT = {
    **dict.fromkeys(("setup", "measure_machine", "create_model"), "setup_s"),
    "generate": "generate_s",
    "score": "score_s",
    **dict.fromkeys(("push_model_state_dict", "pull_model_state_dict", "use_store"), "sync_s"),
    **dict.fromkeys(("sleep", "wake"), "sync_s"),
    **dict.fromkeys(
        ("save_checkpoint", "load_checkpoint", "export_hf", "save_adapter"), "checkpoint_s"
    ),
    **dict.fromkeys(("save_model", "load_model", "finish_saving"), "checkpoint_s"),
    **dict.fromkeys(("close", "abort"), "close_s"),
}
"""Field of `timeouts` that limits a call of an endpoint; `train_s` for all others."""


class ActorTimeoutError(RunError, TimeoutError):
    """No answer within a deadline, from an actor of `role` where that is known."""

    def __init__(self, message: str, *, role: str = "") -> None:
        super().__init__(message)
        self.role = role


class ActorCallError(RunError):
    """An actor's endpoint raised, or its process ended."""


class ActorLostError(ActorCallError):
    """A process of the group is dead (`ranks`, where known), or its actor cannot go on: restart the
    group.

    `is_dead` is False where a process has only not answered, as far as anybody knows.
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
    """Limit the block to `timeout_s`, and name what was waited for in its errors, with the option
    of the limit.

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
        is_dead = end_of_process(str(error)) is not None
        raise _lost_or_failed(
            f"{what}: {describe_loss(error)}", role=role, is_dead=is_dead
        ) from error
    except ValueError as error:  # Monarch's, if a host does not start processes
        if (end := end_of_process(str(error))) is None:
            raise ActorCallError(f"{what}: {error}") from error
        raise _lost_or_failed(
            f"{what}: a process is dead: {end}", role=role, is_dead=True
        ) from error


def _lost_or_failed(message: str, *, role: str, is_dead: bool) -> ActorCallError:
    return ActorLostError(message, role=role, is_dead=is_dead) if role else ActorCallError(message)


class CallGroup(Protocol):
    """Actors of one role that are called together."""

    @property
    def name(self) -> str: ...

    @property
    def timeouts(self) -> Timeouts: ...

    def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorGroup:
    """The actors on a mesh, one a process, with the deadlines of their calls."""

    name: str
    mesh: Any
    timeouts: Timeouts
    processes: Mapping[int, ProcessId] = field(default_factory=dict)
    """Processes of this host, by rank."""
    num_ranks: int | None = None
    rank: int | None = None
    """Set, with the number of ranks of the whole group, if this is one rank of a group."""

    def at_rank(self, rank: int) -> ActorGroup:
        """Return the actor of one rank alone; its errors name the rank."""
        own = {r: process for r, process in self.processes.items() if r == rank}
        mesh = self.mesh.slice(**mesh_index(self.mesh, rank))
        return replace(self, mesh=mesh, processes=own, num_ranks=self.mesh.size(), rank=rank)

    def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Call `endpoint` on every rank and return the answers in rank order.

        The call is sent at once, before the result is awaited: calls reach the actors in the order
        in which they were made.

        Args:
            extra_s: seconds on top of the endpoint's timeout (`TIMEOUT_OF_ENDPOINT`).

        Raises:
            ActorTimeoutError: names actor, endpoint, rank and deadline.
            ActorLostError: names the rank whose process ended.
            ActorCallError: carries the remote traceback; a `RunError` of the actor is raised as
                itself.
        """
        answers = getattr(self.mesh, endpoint).call(*args, **kwargs)
        return self._in_rank_order(answers, endpoint=endpoint, extra_s=extra_s)

    async def _in_rank_order(
        self, answers: Awaitable[Any], *, endpoint: str, extra_s: float
    ) -> list[Any]:
        timeout = TIMEOUT_OF_ENDPOINT.get(endpoint, "train_s")
        limit_s = getattr(self.timeouts, timeout) + extra_s
        deadline = asyncio.timeout(limit_s)
        try:
            with span(f"waits for {self.name}.{endpoint}"):
                async with deadline:
                    values = await self.while_alive(answers, endpoint)
            return [value for _, value in values.items()]
        except TimeoutError as error:
            if not deadline.expired():
                raise
            rank = "" if self.rank is None else f" of rank {self.rank} of {self.num_ranks}"
            message = (
                f"{self.name}.{endpoint}{rank} gave no answer within {limit_s:g} s "
                f"(timeouts.{timeout})"
            )
            raise ActorTimeoutError(message, role=self.name) from error
        except ActorError as error:
            if dead := await self._lost_peers():
                raise self._lost(dead, endpoint) from error
            if isinstance(error.exception, RunError):
                raise error.exception from error
            raise ActorCallError(f"{self.name}.{endpoint} failed:\n{error}") from error
        except SupervisionError as error:
            message = f"{self.name}.{endpoint} failed: {describe_loss(error)}"
            is_dead = end_of_process(str(error)) is not None
            raise ActorLostError(
                message, role=self.name, ranks=self.dead(), is_dead=is_dead
            ) from error

    def dead(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        return [rank for rank, process in self.processes.items() if not is_alive(process)]

    async def seen_dead(self, within_s: float) -> list[int]:
        """Return `dead()` as soon as a rank is dead; a caller without an answer may notice a death
        first.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while not (dead := self.dead()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(within_s / 20)
        return dead

    async def while_alive(
        self, answer: Awaitable[T], what: str, *, grace_s: float = REPORT_GRACE_S
    ) -> T:
        """Wait for an answer that a dead process of the group could not give, without a deadline.

        Args:
            what: name of the answer in the error's message.
            grace_s: time for the answer to end with an error of its own after a death.

        Raises:
            ActorLostError: a process of the group on this host is dead.
        """
        waiting = asyncio.ensure_future(answer)
        dead: list[int] = []
        try:
            with death_watch().watching(tuple(self.processes.values())) as death:
                either: list[asyncio.Future[Any]] = [waiting, death]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                dead = self.dead()
                await asyncio.wait({waiting}, timeout=grace_s)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        raise self._lost(dead, what)

    async def unless_lost(self, work: Awaitable[T], what: str) -> T:
        """Do work that needs all processes of the group, whose deaths may show as any error of it.

        Raises:
            ActorLostError: a process of the group on this host is dead.
            Exception: the error of the work, while all are alive.
        """
        try:
            return await self.while_alive(work, what)
        except ActorLostError:
            raise
        except Exception as error:
            if dead := await self.seen_dead(PEER_GRACE_S):
                raise self._lost(dead, what) from error
            raise

    async def _lost_peers(self) -> list[int]:
        """Return dead ranks after an error of one rank, which may be the loss of another rank."""
        return [] if len(self.processes) < 2 else await self.seen_dead(PEER_GRACE_S)

    def _lost(self, dead: Sequence[int], endpoint: str) -> ActorLostError:
        ranks, num_ranks = ", ".join(map(str, dead)), self.num_ranks or self.mesh.size()
        message = (
            f"{self.name}.{endpoint} failed: rank {ranks} of {num_ranks} is dead: its process ended"
        )
        return ActorLostError(message, role=self.name, ranks=dead)


def mesh_index(mesh: Any, rank: int) -> dict[str, int]:
    """Return the index of a rank in each dimension of a mesh, to slice it."""
    index, left = {}, rank
    for dim, size in reversed(mesh.sizes.items()):
        left, index[dim] = divmod(left, size)
    assert not left, f"there are {mesh.size()} ranks, there is no rank {rank}"
    return index


def is_caused_by_timeout(error: BaseException) -> bool:
    """Return whether a timeout caused an error, here or in an actor."""
    return any(
        isinstance(cause, TimeoutError)
        or isinstance(getattr(cause, "exception", None), TimeoutError)
        for cause in causes(error)
    )


def may_hang(role: str, *, after: BaseException) -> bool:
    """Return whether this role may no longer answer, so that calling it would be useless.

    This is assumed after every deadline except that of another role's answer: ranks that wait for
    each other, and a weight store in the trainer's processes, do not show which process holds them
    up.
    """
    for cause in causes(after):
        if isinstance(cause, ActorTimeoutError) and cause.role:
            return cause.role == role
    return is_caused_by_timeout(after)


def end_of_process(report: str) -> str | None:
    """Return how a process ended, such as "killed by SIGKILL", from a text of Monarch; None if it
    does not say so.
    """
    if killed := re.search(r"Killed\W*(?:signal|sig)\W*(\d+)", report):
        return f"killed by {signal_name(int(killed[1]))}"
    if ended := re.search(
        r"(?:Stopped|Exited)\W*(?:exit_code|exit|code|status)\W*?(-?\d+)", report
    ):
        return f"it ended with status {ended[1]}"
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; a remote traceback may follow it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
