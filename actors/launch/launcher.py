"""Processes of a run: their start and their end.

    async with supervise() as launcher:
        role = await launcher.spawn_role(Placement(role="trainer", num_procs=2))
        await setup_process_group_env(role)
        trainer = role.mesh.spawn("trainer", PolicyTrainer, ...)
        ...

`supervise` stops every role that is left, whether the code returned, raised, or was ended by
Ctrl-C, SIGTERM or SIGHUP. If the controller itself is killed, the kernel kills the actor processes
(Monarch sets their parent-death signal).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

from monarch.actor import HostMesh, MeshFailure, this_host

from actors.config import LaunchConfig, Timeouts
from actors.launch.calls import (
    LOOK_EVERY_S,
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
    deadline,
    end_of_process,
)
from actors.launch.cleanup import (
    RUN,
    RUN_VARIABLE,
    find_by_environment,
    find_processes_of_role,
    find_shared_memory,
    list_with_descendants,
    remove_unmapped,
    wait_until_gone,
)
from actors.launch.compat import configure_monarch, hide_client_start
from actors.launch.early import take_early
from actors.launch.hang_report import add_hang_report
from actors.launch.hosts import Hosts
from actors.launch.isolation import find_secrets, get_network_env, isolate, run_inside
from actors.launch.member import (
    MEMBER_NAME,
    LogSettings,
    RoleProcesses,
    allow_start,
    import_torch,
    process_env,
    process_group_envs,
    spawn_processes,
)
from actors.launch.placement import Placement, Placements
from rl.loop.stop_request import StopRequest
from rl.utils.errors import StopRequestedError
from rl.utils.processes import ProcessId, handle_end_signals, identify, is_alive, kill
from rl.utils.threads import wait_until_event

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = Timeouts().start_s
STOP_TIMEOUT_S = 20.0
KILL_GRACE_S = 60.0
"""Time for the kernel to end a killed process; it first frees the process's memory."""
START_REPORT_GRACE_S = 6.0
"""Time for Monarch to report the signal that ended a process while its role started."""
LOST_STOP_TIMEOUT_S = 5.0
"""Time for Monarch to notice the end of a role whose processes were killed."""
HURRIED_HOSTS_S = 5.0
"""Time to give hosts back for a run that has to end at once; the guard does it otherwise."""
MAX_SIGNALS = 3
"""Signals after which the event loop is taken for blocked, and interrupted where it is."""


class Launcher:
    """Owner of all that this process has started for a run: roles, hosts and background tasks."""

    current: ClassVar[Launcher | None] = None
    """The launcher of this process that was not stopped: one at a time."""

    def __init__(self) -> None:
        """Raise RuntimeError if this process runs actors already."""
        if Launcher.current is not None:
            raise RuntimeError("this process runs actors already: end the other run first")
        configure_monarch(self._note_fault)
        Launcher.current = self
        self.roles: list[RoleProcesses] = []
        self.hosts: Hosts | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._stopping: list[str] = []
        """Names of the roles whose processes relay ends right now."""
        self._hurry = asyncio.Event()
        self._ends: dict[str, str] = {}
        """How the last process of a role ended, by role, as far as Monarch has reported it."""

    def hurry(self) -> None:
        """End without asking actors: `stop_all` kills all processes at once from now on."""
        self._hurry.set()

    async def start_hosts(
        self, config: LaunchConfig, placements: Placements, *, needs_network: str | None = None
    ) -> str:
        """Isolate the actors and start the hosts of a run; return the line of `isolate`.

        Call it before `spawn_role`.
        """
        # First, as sockets of Monarch stay in the namespace in which they were opened.
        network = isolate(
            isolate_network=config.isolate_network,
            cluster=config.hosts if config.on_cluster else None,
            needs_network=needs_network,
        )
        logger.info(network)
        names = find_secrets(config.keep_env)
        if names:
            logger.info(
                "secrets of the environment that actors do not get (launch.keep_env): %s",
                ", ".join(names),
            )
        self.hosts = Hosts(config, placements)
        await self.hosts.start()
        return network

    async def spawn_role(
        self,
        at: Placement,
        *,
        env: Mapping[str, str] | None = None,
        keep: Collection[str] = (),
        logs: LogSettings | None = None,
        needs_torch: bool = True,
        timeout_s: float = START_TIMEOUT_S,
    ) -> RoleProcesses:
        """Start the processes of one role and wait until all of them answer.

        Args:
            at: its hosts, if it has any, were started by `start_hosts`.
            env: variables on top of this process's environment.
            keep: secrets of this process's environment that the processes get.
            logs: destination of the processes' log records, states and spans.
            needs_torch: whether the actors use torch, which is then imported before them.
            timeout_s: longest wait (`timeouts.start_s`).

        Raises:
            ActorTimeoutError: a process did not come up in time; names the role and the option.
            ActorLostError: a process has ended; names the role and the signal or status.
            ActorCallError: the processes could not be started.
        """
        self._ends.pop(at.role, None)  # Of processes that this start replaces.
        allow_start(timeout_s)

        env = (
            process_env(role=at.role, threads=at.threads, gpus=at.gpus, keep=keep)
            | get_network_env()
            | dict(env or {})
        )
        role = take_early(at.role, env=env, is_alone=at.hosts is None and at.num_procs == 1)
        if role is not None:
            logger.info("role %s takes the process that was started early", at.role)
        else:
            role = spawn_processes(
                self._find_host(at),
                role=at.role,
                env=env,
                bootstrap=import_torch if needs_torch else None,
                procs_per_host=at.procs_per_host,
                python=None if self.hosts is None else self.hosts.launch.python,
            )
        # Before the wait, so that `stop_all` ends processes that never answer.
        self.roles.append(role)
        await self._set_up(role, at, logs=logs, env=env, timeout_s=timeout_s)
        return role

    def _find_host(self, at: Placement) -> HostMesh:
        if at.hosts is not None:
            assert self.hosts is not None, "start_hosts comes first"
            return self.hosts.meshes[at.hosts]
        with hide_client_start():
            return run_inside(this_host)

    async def _set_up(
        self,
        role: RoleProcesses,
        at: Placement,
        *,
        logs: LogSettings | None,
        env: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Wait until all processes of a new role answer, and note where they are."""
        what = f"starting role {at.role!r} ({at.procs_per_host} processes a host)"
        try:
            async with deadline(timeout_s, what, option="timeouts.start_s", role=at.role):
                answers = await self._wait_for_answers(
                    at, role.members.set_up.call(at.role, logs, env), what
                )
        except (ActorCallError, ActorTimeoutError) as error:
            role.is_lost = isinstance(error, ActorLostError)
            if at.hosts is not None and self.hosts is not None:
                self.hosts.mark_failed(at.hosts)
            raise

        role.logs = None if logs is None else logs.folder
        for rank, (_, (pid, hostname)) in enumerate(answers.items()):
            role.hostnames.append(hostname)
            process = identify(pid) if hostname == socket.gethostname() else None
            if process is not None:
                role.local[rank] = process

    async def _wait_for_answers(self, at: Placement, answers: Awaitable[T], what: str) -> T:
        """Wait for the first answers of a role.

        Raises:
            ActorLostError: a process of the role on this machine is dead. Monarch alone would wait
                for the whole deadline.
        """
        waiting, seen = asyncio.ensure_future(answers), set[ProcessId]()
        is_here = at.hosts is None or self.hosts is None or at.hosts in self.hosts.processes
        grace_s = START_REPORT_GRACE_S
        try:
            while grace_s > 0:
                if (await asyncio.wait({waiting}, timeout=LOOK_EVERY_S))[0]:
                    return waiting.result()
                if not all(map(is_alive, seen)):
                    grace_s -= LOOK_EVERY_S  # Monarch may report it, with the signal.
                elif is_here and len(seen) < at.num_procs:
                    # In a thread and only until all are there: it reads every process of the
                    # machine.
                    parents = self._list_parents(at)
                    seen |= set(
                        await asyncio.to_thread(find_processes_of_role, at.role, parents=parents)
                    )
        finally:
            waiting.cancel()
        raise self.add_signal(
            ActorLostError(f"{what}: a process is dead", role=at.role, is_dead=True)
        )

    def _list_parents(self, at: Placement) -> list[int]:
        """Return the processes of this machine that start those of a role."""
        hosts = () if self.hosts is None else self.hosts.processes.get(at.hosts or "", ())
        return [os.getpid(), *(host.pid for host in hosts)]

    def add_signal(self, error: ActorLostError) -> ActorLostError:
        """Return the error of a lost role, with the signal if Monarch has reported it."""
        end = self._ends.get(error.role)
        if end is None or end in str(error):
            return error
        return ActorLostError(f"{error}: {end}", role=error.role, ranks=error.ranks, is_dead=True)

    async def end_lost(self, at: Placement) -> None:
        """Kill the rest of a role that has lost a process; replace hosts that are lost too."""
        for role in list(self.roles):
            if role.name == at.role:
                await self.stop(role, timeout_s=LOST_STOP_TIMEOUT_S, is_lost=True)
        if at.hosts is not None and self.hosts is not None:
            await self.hosts.replace_lost(at.hosts)

    async def stop(
        self, role: RoleProcesses, *, timeout_s: float = STOP_TIMEOUT_S, is_lost: bool = False
    ) -> None:
        """End every process of the role, their children and their shared memory; idempotent.

        Processes on this host that are left after `timeout_s` are killed; those of a lost role at
        once.

        Raises:
            RunError: a process outlived SIGKILL (stuck in the kernel); names role and pids.
        """
        if role not in self.roles:
            return
        # A role that has not answered yet has no list of its processes.
        processes = role.local.values() or find_processes_of_role(role.name, parents=[os.getpid()])
        tree = list_with_descendants(filter(is_alive, processes))
        if role.is_lost or not all(map(is_alive, role.local.values())):
            # Monarch would wait for the dead as well.
            timeout_s = min(timeout_s, LOST_STOP_TIMEOUT_S)
        # Read while the processes live, as nothing shows later which files were theirs.
        shm_files = find_shared_memory(process.pid for process in tree)
        self._stopping.append(role.name)
        try:
            if is_lost:
                for process in tree:
                    kill(process)
                role.remove_state_files()
            # A role that never came up raises here whatever its start raised, even BaseExceptions:
            # `gather` makes that a value, and the rest of the role is killed.
            asking = wait_until_event(self._hurry, _ask_to_stop(role, timeout_s))
            (answer,) = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(answer, BaseException):
                level = logging.DEBUG if is_lost else logging.WARNING
                logger.log(level, "role %s did not stop when asked: %s", role.name, answer)
        finally:
            # Runs also when cancelled: only the kernel is waited for below.
            for process in tree:
                kill(process)
            self._stopping.remove(role.name)
            if role in self.roles:
                self.roles.remove(role)
        await wait_until_gone(tree, role=f"role {role.name!r}", grace_s=KILL_GRACE_S)
        remove_unmapped(shm_files)

    async def stop_all(self) -> None:
        """Stop every role at once, then the hosts and every stray process of this run.

        Strays are children of a process that died earlier, or of a role that never came up.
        Background tasks end first, as they would restart roles. After `hurry` nothing is waited for
        but the kernel.
        """
        try:
            await wait_until_event(self._hurry, self.end_background(timeout_s=STOP_TIMEOUT_S))
            # Errors are raised at the end: hosts and strays have to go in any case.
            results = await asyncio.gather(
                *map(self.stop, list(self.roles)), return_exceptions=True
            )
            if self.hosts is not None:
                await wait_until_event(self._hurry, self.hosts.end(), grace_s=HURRIED_HOSTS_S)
        finally:
            Launcher.current = None
            strays = find_by_environment(RUN_VARIABLE, RUN)
            shm_files = find_shared_memory(process.pid for process in strays)
            for process in strays:
                kill(process)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await wait_until_gone(strays, role="any role", grace_s=KILL_GRACE_S)
        remove_unmapped(shm_files)

    def run_in_background(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a coroutine in this event loop until it returns or `stop_all` cancels it."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._finish_background)
        return task

    def _finish_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s failed: %s", task.get_name(), error)

    async def end_background(self, *, timeout_s: float) -> None:
        """Cancel the background tasks and wait for their end."""
        # Again and again, as a task that ends may have started another.
        while tasks := set(self._background):
            for task in tasks:
                task.cancel()
            _, running = await asyncio.wait(tasks, timeout=timeout_s)
            if running:
                logger.warning("%s did not end within %g s", running.pop().get_name(), timeout_s)
                return

    def _note_fault(self, failure: MeshFailure) -> None:
        """Keep how a process has ended for `add_signal`, and log the failure."""
        report = failure.report()
        end = end_of_process(report)
        if end is not None:
            for role in self.roles:
                # A report names the mesh, such as generator_1, which is also part of generator_10.
                is_named = re.search(rf"{re.escape(role.name)}(?!\d)", report)
                if is_named and role.name not in self._stopping:
                    self._ends[role.name] = end

        # The end of a process also fails Monarch's own helpers in it, which no caller waits for.
        is_helper = failure.mesh_name.startswith(("setup-", "logger-", f"{MEMBER_NAME}-"))
        # The caller that waits for an actor decides what its failure means for the run.
        level = logging.DEBUG if is_helper or self._stopping or not self.roles else logging.INFO
        logger.log(level, "actor failure: %s", report)


async def _ask_to_stop(role: RoleProcesses, timeout_s: float) -> None:
    async with deadline(timeout_s, f"stopping role {role.name!r}"):
        await role.mesh.stop()


async def setup_process_group_env(
    role: RoleProcesses, *, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Give every process of the role the variables that `torch.distributed.init_process_group`
    reads.

    MASTER_ADDR is the loopback address when all are on one host, else that of rank 0's host; the
    port is free there.

    Raises:
        ActorTimeoutError, ActorCallError: a process of the role is silent or dead; names the role.
    """
    first = role.members.slice(**dict.fromkeys(role.members.sizes, 0))
    what = f"setting the process group of role {role.name!r}"
    async with deadline(timeout_s, what, option="timeouts.start_s", role=role.name):
        address, port = await first.listen_address.call_one(len(set(role.hostnames)) == 1)
        await role.members.set_env.call(
            process_group_envs(role.hostnames, address=address, port=port)
        )


@asynccontextmanager
async def supervise(*, stop: StopRequest | None = None) -> AsyncIterator[Launcher]:
    """Stop everything that the launcher has started at the end of the block.

    `END_SIGNALS` cancel the block. While a loop listens to `stop`, the first signal is passed to it
    and only the next one cancels. After a signal that cancels, all processes are killed at once, as
    there is nothing left to save.

    Raises:
        KeyboardInterrupt: the loop stopped after Ctrl-C.
        SystemExit: 143 after SIGTERM, 129 after SIGHUP.
    """
    launcher = Launcher()
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    signals: list[int] = []
    is_ending = False

    def end_at_once() -> None:
        launcher.hurry()
        if not is_ending:
            task.cancel()

    def on_signal(number: int) -> None:
        signals.append(number)
        if stop is not None and stop.ask():
            return
        if len(signals) > MAX_SIGNALS:
            # The event loop is blocked, and would never run the callback below.
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(end_at_once)

    with handle_end_signals(on_signal, loop=loop):
        try:
            try:
                yield launcher
            except Exception as error:
                # Before the processes end: their stacks show what they waited for.
                await add_hang_report(error, [role for role in launcher.roles if role.logs])
                raise
            finally:
                is_ending = True
                await launcher.stop_all()
        except (asyncio.CancelledError, StopRequestedError) as error:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if number in signals:
                    raise SystemExit(128 + number) from None
            if signals or isinstance(error, StopRequestedError):
                raise KeyboardInterrupt from None
            raise


def run(
    main: Callable[[Launcher], Coroutine[Any, Any, T]], *, stop: StopRequest | None = None
) -> T:
    """Run a controller's coroutine with a launcher, under `supervise`."""

    async def body() -> T:
        async with supervise(stop=stop) as launcher:
            return await main(launcher)

    return asyncio.run(body())
