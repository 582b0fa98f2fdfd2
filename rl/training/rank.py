"""One rank of a training engine: its device, its meshes and the process group that it joined."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.expert_parallel import build_expert_mesh
from rl.distributed.mesh import DataRank, Degrees, build_mesh
from rl.distributed.process_group import World, connect, disconnect, name_watchdog_file, set_timeout
from rl.distributed.runtime import seed_everything
from rl.distributed.sharding import ShardingOptions
from rl.models.converter import ModelConverters
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.policy import Policy

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RankInfo:
    """Device, meshes and process group of one rank; several engines of a process can share them."""

    config: TrainingEngine.Config
    device: torch.device
    mesh: DeviceMesh | None
    """Device mesh of the ranks; None for a single process."""
    expert_mesh: DeviceMesh | None
    """Device mesh of expert parallelism; None without it."""
    joined: bool
    """True if the process group was created here and is left by `leave`."""

    @classmethod
    def join(
        cls,
        config: TrainingEngine.Config,
        *,
        degrees: Degrees,
        world: World,
        device: torch.device,
        record_in: str | None,
    ) -> RankInfo:
        """Join the process group and build the meshes.

        Args:
            record_in: folder that receives the latest collectives of a rank that hangs.

        Raises:
            TimeoutError: not all ranks appeared in time.
        """
        if record_in is not None:
            name_watchdog_file(record_in)
        # FSDP does the copying of offloaded parameters, so that one process needs a mesh too.
        offload = config.training.cpu_offload
        joined = connect(world=world, device=device, comm=config.comm, always=offload)
        mesh = build_mesh(degrees, device_type=device.type, always=offload)
        expert_mesh = build_expert_mesh(mesh, degree=degrees.ep)
        return cls(config=config, device=device, mesh=mesh, expert_mesh=expert_mesh, joined=joined)

    def shared_by(self, config: TrainingEngine.Config) -> RankInfo:
        """Return the same rank for another engine, which does not leave the process group."""
        return replace(self, config=config, joined=False)

    def make_policy(self, spec: ModelSpec, training: TrainingConfig) -> Policy:
        """Return a policy without weights; `training` replaces the engine's."""
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
            options=self._sharding_options(training),
            converters=ModelConverters(config.converters, spec=spec, degrees=degrees, device=self.device),
        )
        if config.print_after_conversion and policy.is_first_rank:
            logger.info("the model after its converters:\n%s", policy.model)
        return policy

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of every later collective."""
        for mesh in (self.mesh, self.expert_mesh):
            set_timeout(mesh, timeout_s=timeout_s)

    def leave(self) -> None:
        """Leave the process group if it was created here."""
        if self.joined:
            disconnect()
            self.joined = False

    def _sharding_options(self, training: TrainingConfig) -> ShardingOptions:
        config, parallelism = self.config, self.config.parallelism
        return ShardingOptions(
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            reshard_after_forward=parallelism.reshard_after_forward,
            loss_parallel=parallelism.loss_parallel,
            async_tensor_parallel=parallelism.async_tensor_parallel,
            cpu_offload=training.cpu_offload,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            expert_mesh=self.expert_mesh,
            expert_tensor_parallel=parallelism.expert_tensor_parallel_degree > 1,
        )
