"""The start of each role of a run, from its processes to an actor that is set up; once, and after a loss."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import ProcMesh

from actors import hosts, launch
from actors.calls import ActorCallError, ActorGroup, ActorTimeoutError
from actors.fleet_config import FleetConfig
from actors.placement import Place, Placement
from actors.roles import Roles
from rl.rollouts.rubric import Rubric

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
"""For a process to start on hosts of which one may be dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """Knows what a run is made of, and where."""

    config: FleetConfig
    roles: Roles
    placement: Placement
    hf_assets_path: str
    rubric: Rubric
    failure_folder: Path
    """Receives the batch on which a loss was not finite."""
    _renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def trainer(self) -> ActorGroup:
        """With the weight store on its mesh."""
        config = self.config.trainer
        group = await self.roles.trainer(
            self.placement.trainer,
            config.owner,
            imports=("actors.trainer",),
            config=config,
            model_spec=self.roles.model_spec,
            failure_folder=str(self.failure_folder),
        )
        return await self._set_up(group)

    async def generator(self, number: int, *, mesh: ProcMesh | None = None) -> ActorGroup:
        """Without weights, as soon as the store is there; `mesh` is as of `Roles.generator`."""
        at = self.placement.generators[number]
        return await self._set_up(await self.roles.generator(at, self.config.generator, mesh=mesh))

    async def reward(self) -> ActorGroup:
        config, at = self.config.reward, self.placement.reward
        mesh = await self.roles.mesh(at, imports=("actors.reward",))
        actors = mesh.spawn(at.role, config.owner, config=config, rubric=self.rubric)
        group = self.roles.group(at, mesh, actors)
        await group.call("setup", limit="setup_s")
        return group

    async def reward_again(self) -> ActorGroup:
        """After a loss."""
        await self.end(self.placement.reward)
        return await self.reward()

    async def end(self, at: Place) -> None:
        """End what a loss has left of a role; if its hosts are lost too, there are new ones afterwards."""
        await launch.stop_lost(at.role)
        if at.hosts is None:
            return
        async with self._renewing:  # of another generator on the same host
            if await self._are_lost(at):
                self.roles.hosts[at.hosts] = await hosts.renew_hosts(
                    self.config.launch, self.placement, at.hosts
                )

    async def _are_lost(self, at: Place) -> bool:
        assert at.hosts is not None
        if not self.config.launch.on_cluster:
            return hosts.are_lost(at.hosts)
        # Of another machine nobody knows but who asks it for a process.
        probe = f"{at.role}_probe"
        try:
            await launch.spawn_role(
                probe,
                num_procs=1,
                host=self.roles.hosts[at.hosts],
                python=self.config.launch.python,
                timeout_s=PROBE_TIMEOUT_S,
            )
        except (ActorCallError, ActorTimeoutError) as error:
            logger.info("hosts %r are taken for lost: %s", at.hosts, error)
            return True
        finally:
            await launch.stop_lost(probe)
        return False

    async def _set_up(self, group: ActorGroup) -> ActorGroup:
        # Who shares a device is set up by turns, when all processes are there.
        if not self.config.launch.share_gpus:
            await group.call("setup", self.hf_assets_path, limit="setup_s")
        return group
