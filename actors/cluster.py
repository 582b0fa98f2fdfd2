"""All actors of a run: their start, their replacement after a loss, and their end.

    cluster = Cluster(config, launcher=launcher, model_spec=spec, hf_assets_path=folder,
    store=store, logs=logs) await cluster.start() await cluster.trainer.call("forward_backward",
    ...)
    ...
    await cluster.close()

`launch.supervised` ends the processes that are left after an error or after `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from actors.calls import (
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
    deadline,
    first_line,
)
from actors.config import ClusterConfig
from actors.device_lock import DeviceLock
from actors.generator import generator_env
from actors.group import ActorGroup
from actors.launch import Launcher, setup_process_group_env
from actors.members import LogSettings, RoleProcesses
from actors.parity import ParityText
from actors.placement import Placement, count_gpus, place_actors, trains_on_gpu
from actors.pool import GeneratorPool
from actors.recovery import AddEvent, Supervisor, no_event
from rl.models.spec import ModelSpec
from rl.observability.logs import QUIET_ENVIRONMENT
from rl.rollouts.rubric import Rubric
from rl.utils.clock import now_s
from rl.utils.errors import RunError, causes
from rl.utils.threads import all_or_cancel, run_aside
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRAINER_GRACE_S = 10.0
"""Time for a call to a dead trainer to end with its own, more exact error."""
DEATH_GRACE_S = 3.0
"""Time until the trainer's processes are seen dead; a caller without an answer may notice first."""
SLOW_START_S = 60.0
"""Time between two log records that say what a start still waits for."""
ANSWER_S = 10.0
"""Time for trainer processes on other hosts to show that they are alive."""


class Cluster:
    """The trainer, the generators and the reward processes of a run.

    `trainer`, `reward` and the members of `pool` stay valid when the actors behind them are
    replaced. `reward` is None if `config.reward.num_procs` is 0.
    """

    trainer: ActorGroup
    pool: GeneratorPool
    reward: ActorGroup | None = None
    network: str
    """Line that says whether the actors have a network of their own; set by `start`."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        launcher: Launcher,
        model_spec: ModelSpec,
        hf_assets_path: str,
        store: WeightStore,
        logs: LogSettings,
        parity: ParityText | None = None,
        drains: bool = False,
        rubric: Rubric | None = None,
        trainer_arguments: Mapping[str, Any] | None = None,
        events: AddEvent = no_event,
    ) -> None:
        """
        Args:
            launcher: starts the processes; nothing was started by it yet.
            hf_assets_path: folder that trainer and generators are set up from.
            parity, drains: see `GeneratorPool`.
            rubric: needed if there are reward processes.
            trainer_arguments: arguments of the trainer actor besides its config and the store.
            events: records losses and replacements of actors.
        """
        assert rubric is not None or not config.reward.num_procs, "reward processes need a rubric"
        self.config = config
        self.store = store
        self._parity = parity
        self._drains = drains
        self.placements = place_actors(config, num_gpus=count_gpus())
        self._model_spec = model_spec
        self._hf_assets_path = hf_assets_path
        self._logs = logs
        self._rubric = rubric
        self._trainer_arguments = dict(trainer_arguments or {})
        self.launcher = launcher
        self._supervisor = Supervisor(
            config.recovery, in_background=launcher.in_background, events=events
        )
        self._store_started = asyncio.Event()
        self._restarts = config.recovery.max_restarts > 0 and not config.launch.share_gpus
        self._has_new_store = False
        """True if the trainer was started again before all roles were there, and with it the store.
        """
        self._phases: dict[str, str] = {}
        """What each role that starts is doing."""

    async def start(self) -> None:
        """Start all roles at the same time and set their actors up."""
        config = self.config
        remote = self._rubric.remote if self._rubric is not None and config.reward.num_procs else ()
        asks = f"the reward function {remote[0]!r}, called in reward actors," if remote else None
        self.network = await self.launcher.start_hosts(
            config.launch, self.placements, needs_network=asks
        )
        trainer, *started = await self._start_all()
        if self.placements.reward is not None:
            reward = started.pop()
            self.reward = replace(reward, start=self._restart_reward, supervisor=self._supervisor)
        self.trainer = trainer
        members: Sequence[ActorGroup] = [
            replace(
                group, start=partial(self._restart_generator, number), supervisor=self._supervisor
            )
            for number, group in enumerate(started)
        ]
        if config.launch.share_gpus:
            await self._set_up_in_turns(trainer, started)
            # The pool is made afterwards, of the lock's roles.
            lock = DeviceLock(
                trainer=trainer,
                generators=started,
                pull=lambda version, generators: self.pool.pull(version, generators=generators),
            )
            self.trainer, members = lock.trainer, lock.generators
        self.pool = GeneratorPool(
            members,
            trainer=self.trainer,
            store=self.store,
            parity=self._parity,
            drains=self._drains,
        )
        if self._has_new_store:
            await self.pool.use_store()
        if self._restarts:
            self.launcher.in_background(self.pool.watch(), name="watch over the generators")

    async def _start_all(self) -> list[ActorGroup]:
        """Start all roles together: trainer, generators, and the reward processes if there are
        any.
        """
        at = self.placements
        # No role waits for another's set-up: the start takes as long as the slowest role.
        starts = [
            self._start_role(at.trainer, self._start_trainer, again=self._start_trainer_again)
        ]
        for number, placement in enumerate(at.generators):
            start = partial(self._start_generator, number)
            starts.append(
                self._start_role(
                    placement, start, again=partial(self._start_generator_again, number)
                )
            )
        if at.reward is not None:
            starts.append(
                self._start_role(at.reward, self._start_reward, again=self._restart_reward)
            )
        reporting = asyncio.create_task(self._report_slow_start())
        try:
            return await all_or_cancel(starts)
        finally:
            reporting.cancel()

    async def _start_role(
        self,
        at: Placement,
        start: Callable[[], Awaitable[ActorGroup]],
        *,
        again: Callable[[], Awaitable[ActorGroup]],
    ) -> ActorGroup:
        """Start a role, and start it `again` within the limits of `recovery` if a process of it is
        lost meanwhile.

        Raises:
            ActorLostError: nothing is restarted; names role and rank.
            RestartsUsedUpError: the role was lost too often.
        """
        try:
            return await start()
        except ActorLostError as error:
            if not self._restarts or error.role != at.role:
                raise
            lost = error
        self._phases[at.role] = "is started again"
        return await self._supervisor.restart(
            at.role, reason=first_line(lost), start=again, cause=lost
        )

    async def _report_slow_start(self) -> None:
        began_s = now_s()
        while True:
            await asyncio.sleep(SLOW_START_S)
            waits = ", ".join(f"{role} ({phase})" for role, phase in self._phases.items())
            logger.warning("still starting after %.0f s: %s", now_s() - began_s, waits)

    async def close(self) -> None:
        """End the actors and the store in order; errors are logged, as the run's results are
        complete.
        """
        up = [member for member in self.pool.members if member.is_up]
        # A generator that is being restarted needs no clean end.
        await self.launcher.end_background(timeout_s=self.config.timeouts.close_s)
        roles = [self.trainer, *up, *([] if self.reward is None else [self.reward])]
        # A process that is lost now is not restarted.
        groups = [replace(role, start=None, hold_devices=None) for role in roles]
        ends = [*(group.call("close", timeout="close_s") for group in groups), self.store.stop()]
        for problem in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(problem, Exception):
                logger.warning("not a clean end, its processes are killed: %s", problem)

    async def while_trainer_lives(self, training: Coroutine[Any, Any, None]) -> None:
        """Run `training`; raise ActorLostError also if the trainer dies while no call to it is
        made.
        """
        running = asyncio.ensure_future(training)
        try:
            await self.trainer.wait_while_alive(running, "training", grace_s=TRAINER_GRACE_S)
        finally:
            # The training must have ended before anything is restarted.
            running.cancel()
            await asyncio.wait({running})

    async def restart_trainer(self, error: RunError, *, at_least: int = 1) -> None:
        """Replace a lost trainer by a new one with the starting weights; the caller loads a
        checkpoint.

        All pushed versions are gone; the generators drop their requests and serve nothing until the
        next version. The training that `error` ended must have ended.

        Args:
            at_least: number of times the trainer was lost without any progress.

        Raises:
            RunError: `error`, if the trainer is not lost or nothing is restarted.
            RestartsUsedUpError: the trainer was lost too often.
        """
        reason = await self._reason_of_loss(error) if self._restarts else None
        if reason is None:
            raise error
        async with self.pool.without_weights():
            await self._supervisor.restart(
                self.trainer.name,
                reason=reason,
                start=self._replace_trainer,
                cause=error,
                at_least=at_least,
            )

    async def _reason_of_loss(self, error: RunError) -> str | None:
        """Return the reason of the trainer's loss, or None if it is alive."""
        for cause in causes(error):
            if isinstance(cause, ActorLostError) and cause.role == self.trainer.name:
                return first_line(cause)
        dead = await self.trainer.wait_for_death(within_s=DEATH_GRACE_S)
        if dead:
            return f"rank {', '.join(map(str, dead))} is dead: its process ended"
        for role in self.launcher.roles:
            if role.name == self.trainer.name and len(role.local) < role.mesh.size():
                try:
                    async with deadline(ANSWER_S, f"asking role {role.name!r} whether it is alive"):
                        await role.members.check.call()
                except (ActorCallError, ActorTimeoutError) as lost:
                    return first_line(lost)
        return None

    async def _replace_trainer(self) -> None:
        self.trainer.take_over(await self._start_trainer_again())
        await self.pool.use_store()

    async def _start_trainer_again(self) -> ActorGroup:
        await self.launcher.end_lost(self.placements.trainer)
        # The store's actors are dead; its files may take a while to remove.
        self._store_started.clear()
        self._has_new_store = True
        self.store.forget()
        limit_s = self.store.config.timeout_s
        await run_aside(
            self.store.discard, name="removing the lost trainer's versions", limit_s=limit_s
        )
        return await self._start_trainer()

    async def _restart_generator(self, number: int) -> ActorGroup:
        return await self.pool.join(await self._start_generator_again(number))

    async def _start_generator_again(self, number: int) -> ActorGroup:
        await self.launcher.end_lost(self.placements.generators[number])
        return await self._start_generator(number)

    async def _restart_reward(self) -> ActorGroup:
        assert self.placements.reward is not None
        await self.launcher.end_lost(self.placements.reward)
        return await self._start_reward()

    async def _start_trainer(self) -> ActorGroup:
        at, config = self.placements.trainer, self.config.trainer

        async def start(role: RoleProcesses) -> ActorGroup:
            await setup_process_group_env(role, timeout_s=self.config.timeouts.start_s)
            await self.store.start(role.mesh)
            self._store_started.set()
            group = self._group(
                at, role, config=config, store=self.store, **self._trainer_arguments
            )
            return await self._set_up(group)

        return await self._spawn(at, start, imports=(config.owner.__module__,))

    async def _start_generator(self, number: int) -> ActorGroup:
        """Start a generator without weights, once the store has started."""
        at, config = self.placements.generators[number], self.config.generator

        async def start(role: RoleProcesses) -> ActorGroup:
            await setup_process_group_env(role, timeout_s=self.config.timeouts.start_s)
            # An actor gets a copy of the store as it is when the actor is spawned. If the trainer
            # fails, so does the whole start, which ends this wait.
            await self._store_started.wait()
            group = self._group(
                at, role, config=config, model_spec=self._model_spec, store=self.store
            )
            return await self._set_up(group)

        return await self._spawn(
            at, start, imports=self._engine_imports(), env=generator_env(config)
        )

    async def _start_reward(self) -> ActorGroup:
        at, config = self.placements.reward, self.config.reward
        assert at is not None

        async def start(role: RoleProcesses) -> ActorGroup:
            group = self._group(at, role, config=config, rubric=self._rubric)
            await group.call("setup", timeout="setup_s", extra_s=config.start_timeout_s)
            return group

        return await self._spawn(at, start, imports=("actors.reward",))

    async def _set_up(self, group: ActorGroup) -> ActorGroup:
        # Groups that share devices are set up one after another, when all processes are there.
        if not self.config.launch.share_gpus:
            await group.call("setup", self._hf_assets_path, timeout="setup_s")
        return group

    async def _set_up_in_turns(self, trainer: ActorGroup, generators: Sequence[ActorGroup]) -> None:
        """Set up trainer and generators that share devices, one after the other."""
        await trainer.call("setup", self._hf_assets_path, timeout="setup_s")
        await trainer.call("sleep", timeout="sync_s")
        await asyncio.gather(
            *(group.call("setup", self._hf_assets_path, timeout="setup_s") for group in generators)
        )
        await asyncio.gather(*(group.call("sleep", timeout="sync_s") for group in generators))
        await trainer.call("wake", timeout="sync_s")

    async def _spawn(
        self,
        at: Placement,
        start: Callable[[RoleProcesses], Coroutine[Any, Any, ActorGroup]],
        *,
        imports: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> ActorGroup:
        """Start the processes of one role, import modules there, and `start` its actors.

        Raises:
            ActorLostError: a process of the role ended meanwhile.
        """
        env = QUIET_ENVIRONMENT | dict(env or {})
        keep = set(self.config.launch.keep_env)
        if at is self.placements.reward and self._rubric is not None:
            keep |= self._rubric.key_variables
        timeouts = self.config.timeouts
        self._phases[at.role] = "its processes start"
        role = await self.launcher.spawn_role(
            at, env=env, keep=keep, logs=self._logs, timeout_s=timeouts.start_s
        )

        async def finish() -> ActorGroup:
            self._phases[at.role] = "imports modules"
            importing = f"importing modules in role {at.role!r}"
            async with deadline(
                timeouts.setup_s, importing, option="timeouts.setup_s", role=at.role
            ):
                # Importing is faster before there are actors.
                await role.members.import_modules.call(imports)
            self._phases[at.role] = "is set up"
            return await start(role)

        processes = ActorGroup(
            name=at.role, mesh=role.mesh, timeouts=timeouts, processes=role.local
        )
        try:
            group = await processes.wait_unless_lost(finish(), "start")
        except ActorLostError as error:
            told = self.launcher.with_signal(error)
            if told is error:
                raise
            raise told from error
        del self._phases[at.role]
        return group

    def _group(
        self, at: Placement, role: RoleProcesses, *, config: Any, **arguments: Any
    ) -> ActorGroup:
        actors = role.mesh.spawn(at.role, config.owner, config=config, **arguments)
        return ActorGroup(
            name=at.role, mesh=actors, timeouts=self.config.timeouts, processes=role.local
        )

    def _engine_imports(self) -> tuple[str, ...]:
        """Return the modules that generators import first, which takes most of the time of a
        start.
        """
        on_gpu = trains_on_gpu(self.config.launch, num_gpus=count_gpus())
        if self._model_spec.batch_invariant and on_gpu:
            # The engine makes a setting of its own before it imports vllm.
            return ("actors.generator",)
        return ("actors.generator", "actors.vllm.core")
