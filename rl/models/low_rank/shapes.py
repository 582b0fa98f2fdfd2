"""The tensors of an adapter on one rank of a sampler, by the trainer's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.sharding import local_tensor, wrap_like
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder
from rl.models.lora import LoRA
from rl.models.low_rank.layer import FACTORS, SUFFIX, Factors, LowRank, follow_base_weights
from rl.models.parallelize import parallelize_decoder_generator
from rl.models.spec import ModelSpec

MAX_SHAPES = 64
"""Settings of adapters whose shapes are remembered."""


class AdapterShapes:
    """Layers and shapes of all adapters with the same settings, in a sampler's layout."""

    def __init__(self, spec: ModelSpec, lora: LoRA.Config, *, mesh: DeviceMesh | None) -> None:
        """Find the layers; raise ValueError as `LoRA.convert`.

        Args:
            mesh: tensor-parallel mesh of a generator; None for a single process.
        """
        config = replace(lora, initial_adapter=None)
        device = torch.device("meta")
        with device:
            model: Decoder = spec.model.build()
            # The names are those of the trainer's parameters, which the pushed tensors have.
            ModelConverters(
                (config,),
                spec=spec,
                degrees=ParallelismConfig().resolve_degrees(1),
                device=device,
            ).convert(model)
            if mesh is not None:
                parallelize_decoder_generator(model, mesh)
                follow_base_weights(model)
        self.layers: dict[str, LowRank] = {}
        """Adapters on the meta device, by the name of their layer."""
        for name, module in model.named_modules():
            if isinstance(module, LowRank):
                self.layers[name.removesuffix(SUFFIX)] = module

    def allocate(self, dtype: torch.dtype, *, device: torch.device) -> dict[str, Tensor]:
        """Return uninitialized factors by the names of the trainer's parameters."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            for factor in FACTORS:
                parameter = getattr(layer, factor)
                shape = local_tensor(parameter).shape
                local = torch.empty(shape, dtype=dtype, device=device)
                tensors[f"{name}{SUFFIX}.{factor}"] = wrap_like(parameter.detach(), local)
        return tensors

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
        """Return the factors of each layer, given tensors of `allocate`."""
        factors: dict[str, Factors] = {}
        for name, layer in self.layers.items():
            factors[name] = Factors(
                a=local_tensor(tensors[f"{name}{SUFFIX}.lora_a"]),
                b=local_tensor(tensors[f"{name}{SUFFIX}.lora_b"]),
                layer=layer,
                rows_ON=layer.take_local_rows(torch.device("cpu")),
            )
        return factors


class KnownShapes:
    """The shapes of a sampler's adapters, which are found once for adapters of equal settings."""

    def __init__(self, spec: ModelSpec, *, mesh: DeviceMesh | None) -> None:
        self._spec, self._mesh = spec, mesh
        self._known: dict[str, AdapterShapes] = {}

    def find(self, lora: LoRA.Config) -> AdapterShapes:
        """Return the shapes of adapters with these settings; raise ValueError as `LoRA.convert`."""
        # Seeds and folders change no shape.
        settings = repr(replace(lora, seed=0, initial_adapter=None))
        if settings not in self._known:
            shapes = AdapterShapes(self._spec, lora, mesh=self._mesh)
            # Clients choose the settings, of which there are more than need to be remembered.
            if len(self._known) == MAX_SHAPES:
                self._known.clear()
            self._known[settings] = shapes
        return self._known[settings]
