"""Float8 matrix products in linear layers, from torchao.

Weights keep their dtype in training and for the optimizer: inputs, weights and gradients are scaled and cast for
each product, with dynamic scales. torchao is only imported here, and only if a config asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

from rl.distributed.mesh import Degrees
from rl.distributed.sharding import unwrapped
from rl.models.converter import ModelConverter
from rl.models.spec import ModelSpec

MULTIPLE = 16
"""Divisor of all sizes of a float8 product: both sizes of the weight, and the number of tokens."""
CAPABILITY = (8, 9)
"""Lowest NVIDIA compute capability with float8 products (Ada; Hopper is 9.0)."""
HEAD = "lm_head"


class Float8(ModelConverter):
    """Converter of all linear layers except the output head, which keeps the precision of its logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
        """Granularity of scales: a tensor (fastest) or a row. The last also computes the gradient of the weight
        in high precision (most accurate)."""
        enable_fsdp_float8_all_gather: bool = False
        """Cast shards before FSDP gathers them, for a quarter of float32's bytes. Tensorwise only."""
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        """Compute the scales of all weights together after each step rather than one by one when gathered."""
        filter_fqns: tuple[str, ...] = ()
        """Name parts of layers to leave unconverted."""
        emulate: bool = False
        """Round to float8 and multiply in float32: the numerics without the hardware, slowly."""

        def __post_init__(self) -> None:
            if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
                raise ValueError(
                    f"enable_fsdp_float8_all_gather=True with recipe={self.recipe!r}: shards are gathered "
                    "with one scale a tensor; must be 'tensorwise'"
                )
            if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
                raise ValueError(
                    "precompute_float8_dynamic_scale_for_fsdp=True: must be with "
                    "enable_fsdp_float8_all_gather=True, whose scales it computes"
                )

    config: Config
    keeps_bits = False
    token_multiple = MULTIPLE

    def __init__(self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device) -> None:
        """Raise ValueError if the device has no float8, nothing is sharded for the all-gather, or torchao is
        missing."""
        super().__init__(config=config, spec=spec, degrees=degrees, device=device)
        if spec.model.has_experts:
            raise ValueError(
                "Float8 must not be there for a model with experts, because it would leave their grouped products, "
                "most of the arithmetic, unchanged"
            )
        if not config.emulate:
            _check_hardware(device)
        if config.enable_fsdp_float8_all_gather and degrees.fsdp == 1:
            raise ValueError(
                "enable_fsdp_float8_all_gather=True: nothing is gathered, parameters are whole on every "
                "rank; must be with parallelism.data_parallel_shard_degree or context_parallel_degree above 1"
            )
        if find_spec("torchao") is None:
            raise ValueError("Float8 needs torchao 0.18: pip install 'torchao==0.18.*'")

    def convert(self, model: nn.Module) -> None:
        """Convert the layers; raise ValueError naming an unsupported layer size or an unknown filter."""
        torchao = import_module("torchao.float8")
        linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        chosen = self._chosen(linears)
        for name in chosen:
            self._check_layer(name, linears[name])
        settings = replace(
            torchao.Float8LinearConfig.from_recipe_name(self.config.recipe),
            enable_fsdp_float8_all_gather=self.config.enable_fsdp_float8_all_gather,
            emulate=self.config.emulate,
        )
        torchao.convert_to_float8_training(
            model, module_filter_fn=lambda module, name: name in chosen, config=settings
        )

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        self.post_optimizer_hook(model)

    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Compute the scales of the new weights for FSDP's next all-gather, in one collective."""
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        return unwrapped(tensor)

    def _chosen(self, linears: dict[str, nn.Linear]) -> list[str]:
        """Return the layers to convert, in the model's order."""
        for part in self.config.filter_fqns:
            if not any(part in name for name in linears):
                leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
                raise ValueError(
                    f"filter_fqns has {part!r}, which no linear layer's name contains: they end in "
                    f"{', '.join(leaves)}"
                )
        return [
            name
            for name in linears
            if name != HEAD and not any(part in name for part in self.config.filter_fqns)
        ]

    def _check_layer(self, name: str, linear: nn.Linear) -> None:
        multiple = MULTIPLE * self.degrees.tp
        for field in ("in_features", "out_features"):
            if getattr(linear, field) % multiple:
                raise ValueError(
                    f"{name} has {field}={getattr(linear, field)}: must be a multiple of {multiple} (16 on each "
                    "tensor-parallel rank), or the layer be named in filter_fqns"
                )
        if linear._forward_hooks or linear._forward_pre_hooks:
            raise ValueError(
                f"an earlier converter added to {name}, which Float8 would replace: Float8 must come "
                "before it"
            )


def _check_hardware(device: torch.device) -> None:
    if device.type == "meta":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ValueError(
            f"emulate=False: this {device.type} has no float8 products, which need NVIDIA compute capability "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}; emulate=True gives their rounding anywhere, slowly"
        )
