"""How a training engine starts: what is checked before anything is made, and how its policy is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.async_tensor_parallel import check_peer_access
from rl.distributed.mesh import DataRank, Degrees
from rl.distributed.seeds import seed_everything
from rl.distributed.sharding import ShardingOptions
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.layout import check_layout
from rl.training.policy import Policy, check_sequence_length
from rl.training.reference import check_reference

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a training engine starts from, checked."""

    spec: ModelSpec
    """With the sizes of the folder, where there is one."""
    folder: HFFolder | None
    degrees: Degrees


def check_start(
    config: TrainingEngine.Config,
    spec: ModelSpec,
    hf_assets_path: str | None,
    *,
    world_size: int,
    device: torch.device,
) -> Start:
    """Everything that can be wrong with a config, before a process group or a tensor is made.

    Raises:
        ValueError: naming the field, its value and what is valid, or what the folder lacks.
    """
    check_reference(config.reference, loss=config.loss)
    degrees = check_layout(
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        world_size=world_size,
        device_type=device.type,
    )
    folder = None if hf_assets_path is None else HFFolder(hf_assets_path, tokenizer=True)
    if folder is not None:
        spec = replace(spec, model=spec.from_hf_config(folder.config))
    spec.check_layout(spec.model, config.parallelism)
    check_sequence_length(spec, config.training)
    if config.parallelism.async_tensor_parallel:
        check_peer_access(device=device, num_devices=degrees.tp)
    return Start(spec=spec, folder=folder, degrees=degrees)


def build_policy(
    config: TrainingEngine.Config,
    spec: ModelSpec,
    training: TrainingConfig,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> Policy:
    """Seed this process and make the model in its layout, without weights.

    `training` may differ from the config's in its dtype.
    """
    seed_everything(training.seed, offset=DataRank.of(mesh).index, deterministic=training.deterministic)
    options = ShardingOptions(
        param_dtype=getattr(torch, training.param_dtype),
        reduce_dtype=getattr(torch, training.reduce_dtype),
        reshard_after_forward=config.parallelism.reshard_after_forward,
        loss_parallel=config.parallelism.loss_parallel,
        async_tensor_parallel=config.parallelism.async_tensor_parallel,
        cpu_offload=training.cpu_offload,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
    )
    return Policy(spec=spec, mesh=mesh, device=device, training=training, options=options)
