"""Actor group: the actors of one role, called together, and restarted when they are lost.

    trainer = ActorGroup(name="trainer", mesh=mesh, timeouts=timeouts, processes=role.local)
    result, *_ = await trainer.call(PolicyTrainer.forward_backward, samples, timeout="train_s")

A call ends in one of three ways: all ranks answer, its deadline passes, or a process of the group
is dead. The last is noticed within a second, so that no caller waits half an hour for the dead.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

from monarch.actor import ActorError, Endpoint

from actors.cluster.recovery import Supervisor
from actors.config import Timeouts
from actors.launch.calls import (
    LOOK_EVERY_S,
    PEER_GRACE_S,
    REPORT_GRACE_S,
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
    describe_loss,
    end_of_process,
    find_mesh_index,
    get_first_line,
)
from actors.launch.compat import SupervisionError, get_endpoint_name
from actors.vllm.requests import EngineFailedError
from rl.observability.spans import span
from rl.utils.errors import RunError
from rl.utils.processes import ProcessId, is_alive

T = TypeVar("T")

TimeoutName = Literal[
    "setup_s", "generate_s", "train_s", "score_s", "sync_s", "checkpoint_s", "close_s"
]
"""Field of `timeouts` that limits a call; a message about the limit names the option."""


class HoldDevices(Protocol):
    """Wait for the devices that a group shares with others, and hold them for the block.

    `pulls` is the version of the weights that the call in the block brings to them.
    """

    def __call__(self, *, pulls: int | None) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call under way. A restart may replace the group's actors before they have answered."""

    endpoint: str
    rank: int | None
    mesh: Any
    processes: Mapping[int, ProcessId]


@dataclass(kw_only=True, slots=True, eq=False)
class ActorGroup:
    """The actors of one role, one a process, with the deadlines of their calls.

    With `start` and `supervisor`, actors that are lost are replaced in the background, and calls
    are refused until then; otherwise a loss is an error.

    Example:
        >>> group = ActorGroup(name="reward", mesh=mesh, timeouts=Timeouts(score_s=60))
        >>> score = RewardActor.score
        >>> ((scores,),) = await group.call(score, [rollouts], False, rank=1, timeout="score_s")
    """

    name: str
    mesh: Any
    """The actors; a restart replaces them."""
    timeouts: Timeouts
    processes: Mapping[int, ProcessId] = field(default_factory=dict)
    """Processes of this host, by rank."""
    start: Callable[[], Awaitable[ActorGroup]] | None = None
    """Starts the role again and returns its new actors."""
    supervisor: Supervisor | None = None
    hold_devices: HoldDevices | None = None
    """Turn at devices that another role uses too; None where the group has its own."""
    failure: RunError | None = field(default=None, init=False)
    """Error after which the role is not restarted here."""
    restarting: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def is_up(self) -> bool:
        return self.restarting is None and self.failure is None

    def call(
        self,
        endpoint: Endpoint[..., Any] | str,
        *args: Any,
        timeout: TimeoutName,
        extra_s: float = 0.0,
        rank: int | None = None,
        needs_devices: bool = True,
        pulls: int | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Call `endpoint` on every rank and return the answers in rank order.

        The call is sent at once, before the result is awaited: calls reach the actors in the order
        in which they were made. On shared devices it is sent when they are available, and the
        deadline counts from then.

        Args:
            endpoint: endpoint of the actors' class or of a base of it, or the name of one that
                several classes have.
            timeout: deadline of the call, by its field of `timeouts`.
            extra_s: seconds on top.
            rank: the only rank that is called; None calls all.
            needs_devices: False for calls that are answered while another role has the devices.
            pulls: version of the weights that the call brings to the actors.

        Raises:
            ActorTimeoutError: names actor, endpoint, rank and deadline.
            ActorLostError: names the rank whose process ended. The actors are lost, or are being
                restarted; a failed engine counts as lost.
            ActorCallError: carries the remote traceback; a `RunError` of the actor is raised as
                itself.
        """
        # Nothing is awaited before the send: the order of the calls is that of the messages.
        if self.hold_devices is not None and needs_devices:
            return self._call_on_devices(
                endpoint, *args, timeout=timeout, extra_s=extra_s, rank=rank, pulls=pulls, **kwargs
            )
        name = endpoint if isinstance(endpoint, str) else get_endpoint_name(endpoint)
        if self.restarting is not None:
            return self._refuse(name)

        mesh, processes = self.mesh, self.processes
        if rank is not None:
            # The death of another rank is none of this call's.
            mesh = mesh.slice(**find_mesh_index(mesh, rank))
            processes = {rank: processes[rank]} if rank in processes else {}
        answers = getattr(mesh, name).call(*args, **kwargs)
        call = _Call(endpoint=name, rank=rank, mesh=self.mesh, processes=processes)
        return self._receive(answers, call, timeout=timeout, extra_s=extra_s)

    async def _call_on_devices(
        self, endpoint: Endpoint[..., Any] | str, *args: Any, pulls: int | None, **options: Any
    ) -> list[Any]:
        assert self.hold_devices is not None
        async with self.hold_devices(pulls=pulls):
            return await self.call(endpoint, *args, needs_devices=False, **options)

    async def _refuse(self, endpoint: str) -> list[Any]:
        raise ActorLostError(
            f"{self.name}.{endpoint} failed: it is being started again", role=self.name
        )

    async def _receive(
        self, answers: Awaitable[Any], call: _Call, *, timeout: TimeoutName, extra_s: float
    ) -> list[Any]:
        """Return the answers of a call; begin a restart if they show that the actors are lost."""
        try:
            return await self._wait_for_answers(answers, call, timeout=timeout, extra_s=extra_s)
        except ActorLostError as error:
            self.lose(error, mesh=call.mesh)
            raise
        except EngineFailedError as error:
            if self.start is None:
                raise  # Nothing could replace it: the engine's own words are the best ones.
            # The process lives, but nothing is left in it that could answer another call.
            lost = ActorLostError(f"{self.name}: {error}", role=self.name)
            self.lose(lost, mesh=call.mesh)
            raise lost from error

    async def _wait_for_answers(
        self, answers: Awaitable[Any], call: _Call, *, timeout: TimeoutName, extra_s: float
    ) -> list[Any]:
        name = f"{self.name}.{call.endpoint}"
        limit_s: float = getattr(self.timeouts, timeout) + extra_s
        deadline = asyncio.timeout(limit_s)
        try:
            with span(f"waits for {name}"):
                async with deadline:
                    values = await self._wait_while_alive(answers, call, grace_s=REPORT_GRACE_S)
            return [value for _, value in values.items()]
        except TimeoutError as error:
            if not deadline.expired():
                raise  # It is the actor's own.
            place = "" if call.rank is None else f" of rank {call.rank} of {call.mesh.size()}"
            message = f"{name}{place} gave no answer within {limit_s:g} s (timeouts.{timeout})"
            raise ActorTimeoutError(message, role=self.name) from error
        except ActorError as error:
            # The error of one rank may be the loss of another: a collective has lost its peer.
            if len(call.processes) > 1:
                dead = await _wait_for_death(call.processes, within_s=PEER_GRACE_S)
                if dead:
                    raise self._make_lost_error(dead, call) from error
            if isinstance(error.exception, RunError):
                raise error.exception from error
            raise ActorCallError(f"{name} failed:\n{error}") from error
        except SupervisionError as error:
            raise ActorLostError(
                f"{name} failed: {describe_loss(error)}",
                role=self.name,
                ranks=_find_dead(call.processes),
                is_dead=end_of_process(str(error)) is not None,
            ) from error

    async def watch(self) -> None:
        """Restart the actors as soon as a process is dead, also while no call waits for them.

        Returns when the role is not restarted any more.
        """
        while self.failure is None:
            await asyncio.sleep(LOOK_EVERY_S)
            # A restart, which a call may have begun, has other processes, perhaps on another host.
            dead = self.find_dead() if self.is_up else []
            if dead:
                message = f"rank {', '.join(map(str, dead))} is dead: its process ended"
                self.lose(ActorLostError(message, role=self.name, ranks=dead), mesh=self.mesh)

    def find_dead(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        return _find_dead(self.processes)

    async def wait_for_death(self, *, within_s: float) -> list[int]:
        """Return `find_dead()` as soon as a rank is dead, or nothing after `within_s`.

        A caller without an answer may notice a death before it shows here.
        """
        return await _wait_for_death(self.processes, within_s=within_s)

    async def wait_while_alive(
        self, work: Awaitable[T], what: str, *, grace_s: float = REPORT_GRACE_S
    ) -> T:
        """Wait for work that a dead process of the group could not finish, without a deadline.

        Args:
            what: name of the work in the error's message.
            grace_s: time for the work to end with an error of its own after a death.

        Raises:
            ActorLostError: a process of the group on this host is dead.
        """
        call = _Call(endpoint=what, rank=None, mesh=self.mesh, processes=self.processes)
        return await self._wait_while_alive(work, call, grace_s=grace_s)

    async def _wait_while_alive(self, work: Awaitable[T], call: _Call, *, grace_s: float) -> T:
        waiting = asyncio.ensure_future(work)
        dead: list[int] = []
        try:
            with get_death_watch().watch(tuple(call.processes.values())) as death:
                either: list[asyncio.Future[Any]] = [waiting, death]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                dead = _find_dead(call.processes)
                # Monarch's own report names the signal; it may come after the death shows here.
                await asyncio.wait({waiting}, timeout=grace_s)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        raise self._make_lost_error(dead, call)

    async def wait_unless_lost(self, work: Awaitable[T], what: str) -> T:
        """Wait for work that needs all processes of the group; a death may show as any error.

        Raises:
            ActorLostError: a process of the group on this host is dead.
            Exception: the error of the work, while all are alive.
        """
        call = _Call(endpoint=what, rank=None, mesh=self.mesh, processes=self.processes)
        try:
            return await self._wait_while_alive(work, call, grace_s=REPORT_GRACE_S)
        except ActorLostError:
            raise
        except Exception as error:
            # A peer of the dead may fail first, with the error of a broken connection.
            dead = await _wait_for_death(call.processes, within_s=PEER_GRACE_S)
            if dead:
                raise self._make_lost_error(dead, call) from error
            raise

    def _make_lost_error(self, dead: Sequence[int], call: _Call) -> ActorLostError:
        ranks = ", ".join(map(str, dead))
        message = (
            f"{self.name}.{call.endpoint} failed: rank {ranks} of {call.mesh.size()} is dead: "
            "its process ended"
        )
        return ActorLostError(message, role=self.name, ranks=dead)

    # Restarts

    def lose(self, error: ActorLostError, *, mesh: Any) -> None:
        """Restart the role because the actors of `mesh` are lost, unless that is known already.

        The restart goes on in the background: `_restart`, `Supervisor.restart` (recovery.py), then
        `start`, which for a generator is `GeneratorPool._start_with_weights` (publisher.py) and in
        it `RoleStarter.restart_generator`. Until `take_over`, calls are refused, and the router
        asks other generators.

        Raises:
            ActorLostError: `error`, if the role is not restarted.
        """
        # Many calls fail at one loss, and some only after the restart: each loss counts once.
        if mesh is not self.mesh or not self.is_up:
            return
        if self.start is None or self.supervisor is None or not self.supervisor.config.max_restarts:
            self.failure = error
            raise error
        restart = self._restart(self.start, self.supervisor, error=error)
        self.restarting = self.supervisor.in_background(restart, name=f"restart of {self.name}")

    async def _restart(
        self,
        start: Callable[[], Awaitable[ActorGroup]],
        supervisor: Supervisor,
        *,
        error: ActorLostError,
    ) -> None:
        try:
            restarted = await supervisor.restart(
                self.name, reason=get_first_line(error), start=start, cause=error
            )
            self.take_over(restarted)
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

    def take_over(self, restarted: ActorGroup) -> None:
        """Call the actors of a restarted group from now on."""
        # Calls under way wait for the lost actors still, and fail with them.
        self.mesh, self.processes, self.failure = restarted.mesh, restarted.processes, None

    async def wait_until_up(self) -> None:
        """Wait for a restart that is under way; raise `failure`, if there is one."""
        # The restarted actors may be lost before this task runs again.
        while self.restarting is not None:
            await asyncio.wait({self.restarting})
        if self.failure is not None:
            raise self.failure


def _find_dead(processes: Mapping[int, ProcessId]) -> list[int]:
    return [rank for rank, process in processes.items() if not is_alive(process)]


async def _wait_for_death(processes: Mapping[int, ProcessId], *, within_s: float) -> list[int]:
    """Return the dead ranks as soon as there are any, or none after `within_s`."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    dead = _find_dead(processes)
    while not dead and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(within_s / 20)
        dead = _find_dead(processes)
    return dead


class DeathWatch:
    """Look-out for deaths of the processes that the calls of an event loop wait for.

    Twice a second it looks at each process once, whether one call or thousands wait for it.
    """

    def __init__(self) -> None:
        self._watched: dict[asyncio.Future[None], Collection[ProcessId]] = {}
        self._num_watches: Counter[ProcessId] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        """The next look; None while nothing is watched."""

    @contextmanager
    def watch(self, processes: Collection[ProcessId]) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done as soon as one of the processes is dead."""
        loop = asyncio.get_running_loop()
        death: asyncio.Future[None] = loop.create_future()
        self._watched[death] = processes
        self._num_watches.update(processes)
        # One timer for all calls: a step has thousands under way, of the same few processes.
        if self._timer is None:
            self._timer = loop.call_later(LOOK_EVERY_S, self._check_processes)

        try:
            yield death
        finally:
            death.cancel()
            del self._watched[death]
            for process in processes:
                self._num_watches[process] -= 1
                if not self._num_watches[process]:
                    del self._num_watches[process]

    def _check_processes(self) -> None:
        dead = {process for process in self._num_watches if not is_alive(process)}
        if dead:
            for death, processes in self._watched.items():
                if not death.done() and not dead.isdisjoint(processes):
                    death.set_result(None)

        # An event loop without calls looks at nothing.
        self._timer = None
        if self._watched:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_EVERY_S, self._check_processes)


# Futures and timers belong to one event loop, and tests run many in one process.
_WATCHES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeathWatch] = WeakKeyDictionary()


def get_death_watch() -> DeathWatch:
    """Return the watch of the running event loop."""
    return _WATCHES.setdefault(asyncio.get_running_loop(), DeathWatch())
