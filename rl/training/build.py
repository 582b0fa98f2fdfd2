"""From a model spec to a module in its layout, holding its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.sharding import ShardingOptions
from rl.distributed.shards import local_shard_of, local_tensor
from rl.models.hf import HFFolder, read_parameters
from rl.models.spec import ModelSpec


def build_model(
    spec: ModelSpec,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
    options: ShardingOptions,
) -> nn.Module:
    """The module in its layout, its parameters not yet set; nothing whole is ever allocated."""
    with torch.device("meta"):
        model = spec.model.build().to(dtype)
    model = spec.parallelize(model, mesh=mesh, config=options)
    model.to_empty(device=device)
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
    return model


@torch.no_grad()
def load_hf_weights(model: nn.Module, folder: HFFolder, spec: ModelSpec) -> None:
    """Fill the parameters from a folder, holding one whole tensor at a time; no communication.

    Raises:
        ValueError: naming what is missing, unknown, or of another architecture.
    """
    config = spec.from_hf_config(folder.config)
    if config != spec.model:
        raise ValueError(
            f"{folder.path}: a checkpoint of another architecture or size: its config is {config}, "
            f"the model's {spec.model}"
        )
    adapter = spec.adapter(spec.model)
    folder.check(model, adapter)
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    for name, whole in read_parameters(folder, adapter, parameters):
        local_tensor(parameters[name]).copy_(local_shard_of(whole, parameters[name]))
