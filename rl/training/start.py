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
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.layout import check_layout
from rl.training.memory import MemoryEstimate, MemoryOptions, estimate
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
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        check_device_memory(estimate_memory(config, spec, degrees=degrees, on_gpu=True), device_bytes=total)
    return Start(spec=spec, folder=folder, degrees=degrees)


def estimate_memory(
    config: TrainingEngine.Config, spec: ModelSpec, *, degrees: Degrees, on_gpu: bool
) -> MemoryEstimate:
    """What one rank of this config needs."""
    options = MemoryOptions(
        parallelism=config.parallelism,
        optimizer=config.optimizer,
        activation_checkpoint=config.activation_checkpoint,
        reference=config.reference.enable,
    )
    model: Qwen3.Config = spec.model  # type: ignore[assignment]
    return estimate(model, degrees=degrees, training=config.training, options=options, on_gpu=on_gpu)


def check_device_memory(estimated: MemoryEstimate, *, device_bytes: int) -> None:
    """Raise ValueError if a rank needs more than its device has."""
    if estimated.total > device_bytes:
        raise ValueError(
            f"the trainer needs {estimated.describe()}, its device has {device_bytes / 1e9:.3g} GB: raise "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree, lower "
            "training.max_tokens_per_microbatch, or set activation_checkpoint.mode or "
            "training.logits_chunk_tokens"
        )


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
