"""Where a training engine runs: its device, its meshes, and the process group that it may have joined."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed import flight_recorder
from rl.distributed.expert_parallel import build_expert_mesh
from rl.distributed.mesh import DataRank, Degrees, build_mesh
from rl.distributed.process_group import World, connect, disconnect, set_timeout
from rl.distributed.seeds import seed_everything
from rl.models.converters.converter import ModelConverters
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.engine_config import EngineConfig
from rl.training.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Place:
    """One rank's."""

    config: EngineConfig
    device: torch.device
    mesh: DeviceMesh | None
    """None is a single process."""
    expert_mesh: DeviceMesh | None
    """None without expert parallelism."""
    joined: bool
    """Whether the process group was made for this engine."""

    @classmethod
    def take(
        cls,
        config: EngineConfig,
        *,
        degrees: Degrees,
        world: World,
        device: torch.device,
        record_in: str | None,
        shared: Place | None = None,
    ) -> Place:
        """Meet the other ranks.

        Args:
            record_in: folder that receives the latest collectives of a rank that hangs.
            shared: a place whose groups are taken, and not left, in place of new ones.

        Raises:
            TimeoutError: not all of them appeared in time.
        """
        if shared is not None:
            return replace(shared, config=config, joined=False)
        if record_in is not None:
            flight_recorder.name_file_of_watchdog(record_in)
        # What lives on the host is copied by FSDP, which wants a mesh, of one process too.
        offload = config.training.cpu_offload
        joined = connect(world=world, device=device, comm=config.comm, always=offload)
        mesh = build_mesh(degrees, device_type=device.type, always=offload)
        expert_mesh = build_expert_mesh(mesh, degree=degrees.ep)
        return cls(config=config, device=device, mesh=mesh, expert_mesh=expert_mesh, joined=joined)

    def make_policy(self, spec: ModelSpec, training: TrainingConfig) -> Policy:
        """A policy in this layout, without weights; of the engine's config all but `training` is taken."""
        config = self.config
        seed_everything(
            training.seed, offset=DataRank.of(self.mesh).index, deterministic=training.deterministic
        )
        degrees = config.parallelism.degrees(1 if self.mesh is None else self.mesh.size())
        policy = Policy(
            spec=spec,
            mesh=self.mesh,
            device=self.device,
            training=training,
            options=config.sharding_options(training, expert_mesh=self.expert_mesh),
            converters=ModelConverters(config.converters, spec=spec, degrees=degrees, device=self.device),
        )
        if config.print_after_conversion and (self.mesh is None or dist.get_rank() == 0):
            logger.info("the model after its converters:\n%s", policy.model)
        return policy

    def set_timeout(self, timeout_s: float) -> None:
        """Deadline of every later collective."""
        for mesh in (self.mesh, self.expert_mesh):
            set_timeout(mesh, timeout_s=timeout_s)

    def leave(self) -> None:
        """Leave the process group, if it was made for this engine."""
        if self.joined:
            disconnect()
            self.joined = False
