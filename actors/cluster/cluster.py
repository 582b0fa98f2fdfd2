"""All actors of a run: their start, their replacement after a loss, and their end.

    cluster = await start_cluster(
        config, launcher=launcher, model_spec=spec, hf_assets_path=folder, store=store, logs=logs
    )
    await cluster.trainer.call(PolicyTrainer.forward_backward, samples, timeout="train_s")
    ...
    await cluster.close()

`launcher.supervise` ends the processes that are left after an error or after `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.cluster.group import ActorGroup
from actors.cluster.parity import ParityText
from actors.cluster.publisher import GeneratorPool
from actors.cluster.recovery import AddEvent, ignore_event
from actors.cluster.shared_devices import DeviceLock
from actors.cluster.starter import AgentSetup, RoleStarter, StartedRoles
from actors.config import ClusterConfig
from actors.launch.calls import (
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
    deadline,
    get_first_line,
)
from actors.launch.launcher import Launcher
from actors.launch.member import LogSettings
from actors.launch.placement import count_gpus, place_actors
from rl.agents.program import AgentProgram
from rl.models.spec import ModelSpec
from rl.rollouts.rubric import Rubric
from rl.utils.errors import RunError, list_causes
from rl.utils.proxies import is_loopback
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

TRAINER_GRACE_S = 10.0
"""Time for a call to a dead trainer to end with its own, more exact error."""
DEATH_GRACE_S = 3.0
"""Time until the trainer's processes are seen dead; a caller without an answer may notice first."""
ANSWER_S = 10.0
"""Time for trainer processes on other hosts to show that they are alive."""


async def start_cluster(
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
    agents: AgentSetup | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    events: AddEvent = ignore_event,
) -> Cluster:
    """Start all roles at the same time and set their actors up.

    Args:
        launcher: starts the processes; nothing was started by it yet.
        hf_assets_path: folder that trainer and generators are set up from.
        parity, drains: see `GeneratorPool`.
        rubric: needed if there are reward processes.
        agents: needed if there is an endpoint for agents.
        trainer_arguments: arguments of the trainer actor besides its config and the store.
        events: records losses and replacements of actors.
    """
    placements = place_actors(config, num_gpus=count_gpus())
    # Isolation and hosts come first: every process of the run starts inside of them.
    program = None if agents is None else agents.program
    needs_network = find_network_use(config, rubric, program)
    network = await launcher.start_hosts(config.launch, placements, needs_network=needs_network)

    starter = RoleStarter(
        config=config,
        placements=placements,
        launcher=launcher,
        events=events,
        store=store,
        logs=logs,
        model_spec=model_spec,
        hf_assets_path=hf_assets_path,
        rubric=rubric,
        agents=agents,
        trainer_arguments=dict(trainer_arguments or {}),
    )
    cluster = Cluster(
        starter,
        started=await starter.start_all(),
        network=network,
        parity=parity,
        drains=drains,
    )
    if starter.has_new_store:
        # Generators that were up before have a copy of the first store, which is dead.
        await cluster.pool.use_store()
    if starter.restarts:
        # A generator may die while no call waits for it, and so may the endpoint of agents.
        for member in (*cluster.pool.members, *filter(None, [cluster.agents])):
            launcher.run_in_background(member.watch(), name=f"watch over {member.name}")
    return cluster


def find_network_use(
    config: ClusterConfig, rubric: Rubric | None, program: AgentProgram | None
) -> str | None:
    """Return what needs the network in actors, for a message."""
    if program is not None and config.agents is not None:
        if program.needs_network:
            return "the agents of this task (task.needs_network)"
        if not is_loopback(config.agents.host):
            return f"the endpoint of agents at agents.listen={config.agents.listen!r}"
    if not config.reward.num_procs or rubric is None or not rubric.remote:
        return None
    return f"the reward function {rubric.remote[0]!r}, called in reward actors,"


class Cluster:
    """The trainer, the generators and the reward processes of a run.

    `trainer`, `reward`, `agents` and the members of `pool` stay valid when the actors behind them
    are replaced. `reward` is None if `config.reward.num_procs` is 0, `agents` without
    `config.agents`.
    """

    def __init__(
        self,
        starter: RoleStarter,
        *,
        started: StartedRoles,
        network: str,
        parity: ParityText | None,
        drains: bool,
    ) -> None:
        """Use `start_cluster`. `network` says whether the actors have a network of their own."""
        self.config = starter.config
        self.launcher = starter.launcher
        self.store = starter.store
        self.network = network
        self._starter = starter
        self._supervisor = starter.supervisor

        # The trainer is restarted by `restart_trainer`: first its training has to end.
        self.trainer = trainer = started.trainer
        generators: Sequence[ActorGroup] = started.generators
        self.reward = started.reward and replace(
            started.reward, start=starter.restart_reward, supervisor=self._supervisor
        )
        self.agents = started.agents and replace(
            started.agents, start=starter.restart_agents, supervisor=self._supervisor
        )
        restart: Callable[[int], Awaitable[ActorGroup]] | None = starter.restart_generator
        if self.config.launch.share_gpus:
            lock = DeviceLock(
                trainer=trainer,
                generators=generators,
                pull=lambda version, groups: self.pool.pull_and_check(version, generators=groups),
            )
            # Roles that take turns are not restarted: their loss ends the run.
            self.trainer, generators, restart = lock.trainer, lock.generators, None
        self.pool = GeneratorPool(
            generators,
            trainer=self.trainer,
            store=self.store,
            parity=parity,
            drains=drains,
            keeps_base=bool(self.config.launch.share_gpus),
            start=restart,
            supervisor=self._supervisor,
        )

    async def close(self) -> None:
        """End the actors and the store in order.

        Errors are logged, as the run's results are complete.
        """
        roles = [self.trainer, *(member for member in self.pool.members if member.is_up)]
        # A generator that is being restarted needs no clean end.
        await self.launcher.end_background(timeout_s=self.config.timeouts.close_s)
        roles += filter(None, [self.reward, self.agents])
        # A process that is lost now is not restarted.
        groups = [replace(role, start=None, hold_devices=None) for role in roles]
        ends = [*(group.call("close", timeout="close_s") for group in groups), self.store.stop()]
        for problem in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(problem, Exception):
                logger.warning("not a clean end, its processes are killed: %s", problem)

    async def run_training(self, training: Coroutine[Any, Any, None]) -> None:
        """Run `training`; raise ActorLostError if the trainer dies between the calls to it, too."""
        running = asyncio.ensure_future(training)
        try:
            await self.trainer.wait_while_alive(running, "training", grace_s=TRAINER_GRACE_S)
        finally:
            # The training must have ended before anything is restarted.
            running.cancel()
            await asyncio.wait({running})

    async def restart_trainer(self, error: RunError, *, at_least: int = 1) -> None:
        """Replace a lost trainer by a new one with the starting weights.

        The caller loads a checkpoint. All pushed versions are gone; the generators drop their
        requests and serve nothing until the next version. The training that `error` ended must have
        ended.

        Args:
            at_least: number of times the trainer was lost without any progress.

        Raises:
            RunError: `error`, if the trainer is not lost or nothing is restarted.
            RestartsUsedUpError: the trainer was lost too often.
        """
        reason = await self._find_loss(error) if self._starter.restarts else None
        if reason is None:
            raise error
        async with self.pool.block_pulls():
            await self._supervisor.restart(
                self.trainer.name,
                reason=reason,
                start=self._replace_trainer,
                cause=error,
                at_least=at_least,
            )

    async def _find_loss(self, error: RunError) -> str | None:
        """Return the reason of the trainer's loss, or None if it is alive."""
        for cause in list_causes(error):
            if isinstance(cause, ActorLostError) and cause.role == self.trainer.name:
                return get_first_line(cause)
        dead = await self.trainer.wait_for_death(within_s=DEATH_GRACE_S)
        if dead:
            return f"rank {', '.join(map(str, dead))} is dead: its process ended"

        # Ranks on other hosts cannot be looked at, only asked.
        for role in self.launcher.roles:
            if role.name == self.trainer.name and len(role.local) < role.mesh.size():
                try:
                    async with deadline(ANSWER_S, f"asking role {role.name!r} whether it is alive"):
                        await role.members.check.call()
                except (ActorCallError, ActorTimeoutError) as lost:
                    return get_first_line(lost)
        return None

    async def _replace_trainer(self) -> None:
        self.trainer.take_over(await self._starter.restart_trainer())
        await self.pool.use_store()
