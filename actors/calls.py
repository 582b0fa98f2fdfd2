"""Calling actors: every wait has a deadline, and its error says who was asked for what."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from actors.diagnosis import Watched, exceeded_a_deadline, place_of, told_by_role
from actors.processes import ProcessId, is_alive
from rl.errors import RunError
from rl.observability.activity import doing

T = TypeVar("T")

LOOK_EVERY_S = 0.5
"""How often a waiting call looks whether the processes that it waits for live."""
REPORT_GRACE_S = 3.0
"""For Monarch to say of what a process died; on a busy machine that takes it up to 30 s."""
PEER_GRACE_S = 1.0
"""For a process to be gone whose peers have already told that they lost it: the kernel closes its
connections first."""


@dataclass(kw_only=True, slots=True)
class Timeouts:
    """Longest waits for an actor, in seconds; past one the run stops with an error."""

    setup_s: float = 600.0
    """Importing, loading the model, starting the engine."""
    generate_s: float = 1800.0
    """All completions of a step or of an evaluation."""
    train_s: float = 1800.0
    """One forward_backward, forward, optim_step or compute_logprobs."""
    score_s: float = 600.0
    """Scoring what a reward process is asked for, beyond the time that reward.time_limit_s gives to the
    reward functions of these rollouts and of those that it was asked for before."""
    sync_s: float = 600.0
    """A push of the weights by all trainer ranks, or a pull by all of a generator's; where running
    completions are finished first (generator.on_update 'drain'), after generate_s for these."""
    checkpoint_s: float = 1800.0
    """Saving or loading a checkpoint."""
    close_s: float = 20.0
    """An actor's clean end; its process is killed afterwards either way."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")


class ActorTimeoutError(RunError, TimeoutError):
    """No answer from an actor within its deadline."""

    role = ""
    """Whose answer it was, where that is known."""


class ActorCallError(RunError):
    """An actor's endpoint raised, or its process ended."""


class ActorLostError(ActorCallError):
    """A process of the group is dead, or what runs in it cannot go on: the group has to be started again."""

    def __init__(self, message: str, *, role: str, ranks: Sequence[int] = ()) -> None:
        """`ranks` are those that are known to be lost."""
        super().__init__(message)
        self.role = role
        self.ranks = tuple(ranks)


class Group(Protocol):
    """Actors of one name that are called together: an `ActorGroup`, or one that waits for its turn."""

    @property
    def name(self) -> str: ...

    @property
    def timeouts(self) -> Timeouts: ...

    def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        """As `ActorGroup.call`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorGroup:
    """An actor on each process of a mesh, with the deadlines of its calls."""

    name: str
    mesh: Any
    timeouts: Timeouts
    processes: Mapping[int, ProcessId] = field(default_factory=dict)
    """Those of this host, by rank."""
    num_ranks: int | None = None
    """Of the whole group, where this is one rank of it."""
    rank: int | None = None
    """Which one, where it is one."""
    watched: Watched | None = None
    """Whom an error of a deadline asks what they do."""

    def at_rank(self, rank: int) -> ActorGroup:
        """The actor of one rank alone, which keeps its number in errors."""
        own = {r: process for r, process in self.processes.items() if r == rank}
        mesh = self.mesh.slice(**place_of(self.mesh, rank))
        return replace(self, mesh=mesh, processes=own, num_ranks=self.mesh.size(), rank=rank)

    def call(
        self, endpoint: str, *args: Any, limit: str, more_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Call `endpoint` on every rank; the answers in rank order.

        `limit` is a field of `Timeouts`, or several, joined by " + "; `more_s` is what this call may take
        beyond it.

        The call is sent at once, before what is returned is awaited: calls reach the actors in this order.

        Raises:
            ActorTimeoutError: names actor, endpoint, rank and deadline, and what each process of it does,
                for how long and where.
            ActorLostError: names the rank whose process ended.
            ActorCallError: carries the remote traceback; a `RunError` of the actor comes as itself.
        """
        answers = getattr(self.mesh, endpoint).call(*args, **kwargs)
        return self._in_rank_order(answers, endpoint=endpoint, limit=limit, more_s=more_s)

    async def _in_rank_order(
        self, answers: Awaitable[Any], *, endpoint: str, limit: str, more_s: float
    ) -> list[Any]:
        values = await self._within(answers, endpoint=endpoint, limit=limit, more_s=more_s)
        return [value for _, value in values.items()]

    async def _within(self, answer: Awaitable[T], *, endpoint: str, limit: str, more_s: float) -> T:
        limit_s: float = sum(getattr(self.timeouts, name) for name in limit.split(" + "))
        try:
            with doing(f"waits for {self.name}.{endpoint}"):
                return await asyncio.wait_for(self.while_alive(answer, endpoint), limit_s + more_s)
        except TimeoutError as error:
            more = f" and the {more_s:g} s that its work may take" if more_s else ""
            one = "" if self.rank is None else f" of rank {self.rank} of {self.num_ranks}"
            message = f"{self.name}.{endpoint}{one} gave no answer within timeouts.{limit}={limit_s:g}{more}"
            late = ActorTimeoutError(message)
            late.role = self.name
            late.more = await self._told(message)
            raise late from error
        except ActorError as error:
            if dead := await self._lost_peers():
                raise self._lost(dead, endpoint) from error
            if isinstance(error.exception, RunError):
                raise error.exception from error
            raise ActorCallError(f"{self.name}.{endpoint} failed:\n{error}") from error
        except SupervisionError as error:
            message = f"{self.name}.{endpoint} failed: {lost_rank(error)}"
            lost = ActorLostError(message, role=self.name, ranks=self.dead())
            if not lost.ranks:
                # Monarch takes a process for dead that does not answer it, such as one that is stopped.
                lost.more = await self._told(message)
            raise lost from error

    async def _told(self, title: str) -> str:
        """What those do who gave no answer, as lines; all of it is written to a file under the title."""
        if self.watched is None:
            return ""
        return await told_by_role(self.watched, None if self.rank is None else [self.rank], title=title)

    def dead(self) -> list[int]:
        """The ranks of this host whose process has ended."""
        return [rank for rank, process in self.processes.items() if not is_alive(process)]

    async def seen_dead(self, within_s: float) -> list[int]:
        """As `dead`, as soon as there is one: who misses an answer may know of it first."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not (dead := self.dead()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(within_s / 20)
        return dead

    async def while_alive(self, answer: Awaitable[T], what: str, *, grace_s: float = REPORT_GRACE_S) -> T:
        """Wait for something that cannot come from a dead process of the group, however long that takes.

        `grace_s` is what it may take to end with an error of its own.

        Raises:
            ActorLostError: one of this host is dead; `what` is in the message.
        """
        waiting = asyncio.ensure_future(_coroutine(answer))
        dead: list[int] = []
        try:
            while not dead:
                if (await asyncio.wait({waiting}, timeout=LOOK_EVERY_S))[0]:
                    return waiting.result()
                dead = self.dead()
            if (await asyncio.wait({waiting}, timeout=grace_s))[0]:
                return waiting.result()
        finally:
            waiting.cancel()
        raise self._lost(dead, what)

    async def _lost_peers(self) -> list[int]:
        """After an error of one rank, which may be that it has lost another."""
        return [] if len(self.processes) < 2 else await self.seen_dead(PEER_GRACE_S)

    def _lost(self, dead: Sequence[int], endpoint: str) -> ActorLostError:
        ranks, num_ranks = ", ".join(map(str, dead)), self.num_ranks or self.mesh.size()
        message = f"{self.name}.{endpoint} failed: rank {ranks} of {num_ranks} is dead: its process ended"
        return ActorLostError(message, role=self.name, ranks=dead)


def may_hang(role: str, *, after: BaseException) -> bool:
    """Whether this role may give no answer any more, so that nothing of any use can be asked of it.

    So it is after every deadline but that of an answer of another role: ranks that wait for each other, and a
    weight store that lives in the trainer's processes, do not say who holds them up.
    """
    if isinstance(after, ActorTimeoutError) and after.role:
        return after.role == role
    return exceeded_a_deadline(after)


def lost_rank(error: SupervisionError) -> str:
    """Which rank of a role is dead, and of what, from Monarch's report."""
    report = str(error)
    # Where it stands on the mesh: {'procs': 1/2}, or {'hosts': 0/2, 'procs': 1/2}.
    place = re.search(r"\{(?:'hosts': (\d+)/(\d+), )?'procs': (\d+)/(\d+)\}", report)
    who = "a rank"
    if place:
        host, num_hosts, proc, num_procs = (int(number or 0) for number in place.groups())
        who = f"rank {host * num_procs + proc} of {max(1, num_hosts) * num_procs}"
    return f"{who} is dead: {' '.join(report.split())}"


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
