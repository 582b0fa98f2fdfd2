"""Starts of the roles of a run: processes, imports, and actors that are set up.

Every role starts at the same time; a role that loses a process meanwhile starts again, and so does
each that is lost later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.agents import AgentEndpoint
from actors.cluster.group import ActorGroup
from actors.cluster.recovery import AddEvent, Supervisor
from actors.config import ClusterConfig
from actors.generator import VLLMGenerator, generator_env
from actors.launch.calls import ActorLostError, deadline, get_first_line
from actors.launch.launcher import Launcher, setup_process_group_env
from actors.launch.member import LogSettings, RoleProcesses
from actors.launch.placement import Placement, Placements, count_gpus, trains_on_gpu
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.agents.program import AgentProgram
from rl.models.spec import ModelSpec
from rl.observability.logs import QUIET_ENVIRONMENT
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Rubric
from rl.utils.clock import now_s
from rl.utils.threads import gather_or_cancel, run_in_thread
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

ENDPOINT_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""Messages of agents are short: other threads would take longer to wake than to tokenize them."""
SLOW_START_S = 60.0
"""Time between two log records that say what a start still waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """What the agents' actor needs beside its config."""

    program: AgentProgram
    renderer: Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRoles:
    """The actors of all roles."""

    trainer: ActorGroup
    generators: list[ActorGroup]
    reward: ActorGroup | None
    agents: ActorGroup | None


@dataclass(kw_only=True, eq=False)
class RoleStarter:
    """Starts of the roles of a cluster, the first ones and those after a loss."""

    config: ClusterConfig
    placements: Placements
    launcher: Launcher
    events: AddEvent
    store: WeightStore
    logs: LogSettings
    model_spec: ModelSpec
    hf_assets_path: str
    rubric: Rubric | None
    agents: AgentSetup | None
    trainer_arguments: Mapping[str, Any]
    has_new_store: bool = field(default=False, init=False)
    """True if the trainer was started again before all roles were there, and with it the store."""
    _store_started: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _phases: dict[str, str] = field(default_factory=dict, init=False)
    """What each role that starts is doing."""

    def __post_init__(self) -> None:
        assert self.rubric is not None or not self.config.reward.num_procs, (
            "reward processes need a rubric"
        )
        self.supervisor = Supervisor(
            self.config.recovery, in_background=self.launcher.run_in_background, events=self.events
        )

    @property
    def restarts(self) -> bool:
        """True if roles are started again here after a loss."""
        return self.config.recovery.max_restarts > 0 and not self.config.launch.share_gpus

    async def start_all(self) -> StartedRoles:
        """Start all roles together."""
        at = self.placements
        # No role waits for another's set-up: the start takes as long as the slowest role.
        starts = [self._start_role(at.trainer, self.start_trainer, again=self.restart_trainer)]
        for number, placement in enumerate(at.generators):
            start = partial(self.start_generator, number)
            again = partial(self.restart_generator, number)
            starts.append(self._start_role(placement, start, again=again))
        if at.reward is not None:
            starts.append(self._start_role(at.reward, self.start_reward, again=self.restart_reward))
        if at.agents is not None:
            starts.append(self._start_role(at.agents, self.start_agents, again=self.restart_agents))

        reporting = asyncio.create_task(self._report_slow_start())
        try:
            groups = await gather_or_cancel(starts)
        finally:
            reporting.cancel()
        trainer, *others = groups
        generators, others = others[: len(at.generators)], others[len(at.generators) :]
        if self.config.launch.share_gpus:
            await self._set_up_in_turns(trainer, generators)
        agents = others.pop() if at.agents is not None else None
        reward = others.pop() if at.reward is not None else None
        return StartedRoles(trainer=trainer, generators=generators, reward=reward, agents=agents)

    async def _start_role(
        self,
        at: Placement,
        start: Callable[[], Awaitable[ActorGroup]],
        *,
        again: Callable[[], Awaitable[ActorGroup]],
    ) -> ActorGroup:
        """Start a role; `again` within the limits of `recovery` if one of its processes is lost.

        Raises:
            ActorLostError: nothing is restarted; names role and rank.
            RestartsUsedUpError: the role was lost too often.
        """
        try:
            return await start()
        except ActorLostError as error:
            if not self.restarts or error.role != at.role:
                raise
            lost = error
        self._phases[at.role] = "is started again"
        return await self.supervisor.restart(
            at.role, reason=get_first_line(lost), start=again, cause=lost
        )

    async def _report_slow_start(self) -> None:
        began_s = now_s()
        while True:
            await asyncio.sleep(SLOW_START_S)
            waits = ", ".join(f"{role} ({phase})" for role, phase in self._phases.items())
            logger.warning("still starting after %.0f s: %s", now_s() - began_s, waits)

    # Starts after a loss: what is left of the role ends first

    async def restart_trainer(self) -> ActorGroup:
        await self.launcher.end_lost(self.placements.trainer)
        # The store's actors are dead; its files may take a while to remove.
        self._store_started.clear()
        self.has_new_store = True
        self.store.forget()
        limit_s = self.store.config.timeout_s
        await run_in_thread(
            self.store.discard, name="removing the lost trainer's versions", limit_s=limit_s
        )
        return await self.start_trainer()

    async def restart_generator(self, number: int) -> ActorGroup:
        await self.launcher.end_lost(self.placements.generators[number])
        return await self.start_generator(number)

    async def restart_reward(self) -> ActorGroup:
        assert self.placements.reward is not None
        await self.launcher.end_lost(self.placements.reward)
        return await self.start_reward()

    async def restart_agents(self) -> ActorGroup:
        assert self.placements.agents is not None
        await self.launcher.end_lost(self.placements.agents)
        return await self.start_agents()

    # First starts

    async def start_trainer(self) -> ActorGroup:
        """Start the trainer and, in its processes, the weight store."""
        at, config = self.placements.trainer, self.config.trainer

        async def start(role: RoleProcesses) -> ActorGroup:
            await setup_process_group_env(role, timeout_s=self.config.timeouts.start_s)
            await self.store.start(role.mesh)
            self._store_started.set()
            group = self._spawn_actors(
                at, role, config=config, store=self.store, **self.trainer_arguments
            )
            return await self._set_up(group)

        return await self._spawn(at, start, imports=self._list_trainer_imports())

    async def start_generator(self, number: int) -> ActorGroup:
        """Start a generator without weights, once the store has started."""
        at, config = self.placements.generators[number], self.config.generator

        async def start(role: RoleProcesses) -> ActorGroup:
            await setup_process_group_env(role, timeout_s=self.config.timeouts.start_s)
            # An actor gets a copy of the store as it is when the actor is spawned. If the trainer
            # fails, so does the whole start, which ends this wait.
            await self._store_started.wait()
            group = self._spawn_actors(
                at, role, config=config, model_spec=self.model_spec, store=self.store
            )
            return await self._set_up(group)

        return await self._spawn(
            at, start, imports=self._list_engine_imports(), env=generator_env(config)
        )

    async def start_reward(self) -> ActorGroup:
        at, config = self.placements.reward, self.config.reward
        assert at is not None

        async def start(role: RoleProcesses) -> ActorGroup:
            group = self._spawn_actors(at, role, config=config, rubric=self.rubric)
            await group.call(RewardActor.setup, timeout="setup_s", extra_s=config.start_timeout_s)
            return group

        return await self._spawn(at, start, imports=("actors.reward",), needs_torch=False)

    async def start_agents(self) -> ActorGroup:
        at, config, setup = self.placements.agents, self.config.agents, self.agents
        assert at is not None
        assert config is not None
        assert setup is not None, "a run with agents has a task of agents"

        async def start(role: RoleProcesses) -> ActorGroup:
            group = self._spawn_actors(
                at, role, config=config, program=setup.program, renderer=setup.renderer
            )
            limit_s = config.import_timeout_s
            await group.call(AgentEndpoint.setup, timeout="setup_s", extra_s=limit_s)
            return group

        return await self._spawn(
            at, start, imports=("actors.agents",), needs_torch=False, env=ENDPOINT_ENVIRONMENT
        )

    async def _set_up(self, group: ActorGroup) -> ActorGroup:
        # Groups that share devices are set up one after another, when all processes are there.
        if not self.config.launch.share_gpus:
            await group.call("setup", self.hf_assets_path, timeout="setup_s")
        return group

    async def _set_up_in_turns(self, trainer: ActorGroup, generators: Sequence[ActorGroup]) -> None:
        folder = self.hf_assets_path
        # The devices have room for one side: each sleeps before the next one is set up.
        await trainer.call(PolicyTrainer.setup, folder, timeout="setup_s")
        await trainer.call(PolicyTrainer.sleep, timeout="sync_s")
        setups = [g.call(VLLMGenerator.setup, folder, timeout="setup_s") for g in generators]
        await asyncio.gather(*setups)
        sleeps = [g.call(VLLMGenerator.sleep, timeout="sync_s") for g in generators]
        await asyncio.gather(*sleeps)
        await trainer.call(PolicyTrainer.wake, timeout="sync_s")

    async def _spawn(
        self,
        at: Placement,
        start: Callable[[RoleProcesses], Coroutine[Any, Any, ActorGroup]],
        *,
        imports: Sequence[str],
        needs_torch: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> ActorGroup:
        """Start the processes of one role, import modules there, and `start` its actors.

        Raises:
            ActorLostError: a process of the role ended meanwhile.
        """
        env = QUIET_ENVIRONMENT | dict(env or {})
        keep = set(self.config.launch.keep_env)
        if at is self.placements.reward and self.rubric is not None:
            keep |= self.rubric.key_variables
        if at is self.placements.agents and self.agents is not None:
            keep |= {*self.agents.program.keep_env}
        timeouts = self.config.timeouts

        self._phases[at.role] = "its processes start"
        role = await self.launcher.spawn_role(
            at,
            env=env,
            keep=keep,
            logs=self.logs,
            needs_torch=needs_torch,
            timeout_s=timeouts.start_s,
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
            # Out of memory or a crash: the signal tells them apart.
            told = self.launcher.add_signal(error)
            if told is error:
                raise
            raise told from error
        del self._phases[at.role]
        return group

    def _spawn_actors(
        self, at: Placement, role: RoleProcesses, *, config: Any, **arguments: Any
    ) -> ActorGroup:
        actors = role.mesh.spawn(at.role, config.owner, config=config, **arguments)
        return ActorGroup(
            name=at.role, mesh=actors, timeouts=self.config.timeouts, processes=role.local
        )

    def _list_trainer_imports(self) -> tuple[str, ...]:
        """Return the modules of trainers, and what their first push and forward would import."""
        modules: tuple[str, ...] = (self.config.trainer.owner.__module__, "numba")
        on_gpu = trains_on_gpu(self.config.launch, num_gpus=count_gpus())
        if self.model_spec.batch_invariant and not on_gpu:
            modules += ("rl.models.batch_invariant.functions",)
        return modules

    def _list_engine_imports(self) -> tuple[str, ...]:
        """Return the modules of generators, whose import takes most of the time of a start."""
        on_gpu = trains_on_gpu(self.config.launch, num_gpus=count_gpus())
        if self.model_spec.batch_invariant and on_gpu:
            # The engine makes a setting of its own before it imports vllm.
            return ("actors.generator",)
        return ("actors.generator", "actors.vllm.core")
