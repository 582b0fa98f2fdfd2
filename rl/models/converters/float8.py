"""Linear layers whose matrix products run in float8, by torchao.

Weights stay as they are, in training and to the optimizer: inputs, weights and gradients are scaled and
cast for each product, with scales of the moment ("dynamic").

torchao is imported here alone, and only when a config asks for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl.distributed.mesh import Degrees
from rl.distributed.shards import unwrapped
from rl.models.converters.converter import ModelConverter
from rl.models.spec import ModelSpec

MULTIPLE = 16
"""Every size of a float8 product must be a multiple of it: both of the weight, and the tokens."""
CAPABILITY = (8, 9)
"""First compute capability of NVIDIA's with float8 products (Ada; Hopper is 9.0)."""
HEAD = "lm_head"


class Float8(ModelConverter):
    """All linear layers but the output head, which stays in the precision of its logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
        """What shares a scale: a whole tensor (fastest), or a row. The last also keeps the gradient of the
        weight in high precision (most accurate)."""
        enable_fsdp_float8_all_gather: bool = False
        """FSDP casts its shards before it gathers them: a quarter of float32's bytes. Tensorwise only."""
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        """After each step, the scales of all weights at once rather than each when it is gathered."""
        filter_fqns: tuple[str, ...] = ()
        """Layers whose name contains one of these stay as they are."""
        emulate: bool = False
        """Cast to float8 and back and multiply in float32: the rounding without the hardware, slowly."""

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
    token_multiple = MULTIPLE

    def __init__(self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device) -> None:
        """Raises ValueError for a device without float8, for shards where there are none, without torchao."""
        super().__init__(config=config, spec=spec, degrees=degrees, device=device)
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
        """Raises ValueError naming a layer of a size that float8 cannot multiply, or an unknown filter."""
        torchao = _torchao_float8()
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
        """The scales that FSDP's next gathering uses are those of the new weights; one collective."""
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            _torchao_float8().precompute_float8_dynamic_scale_for_fsdp(model)

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        return unwrapped(tensor)

    def _chosen(self, linears: dict[str, nn.Linear]) -> list[str]:
        """In the model's order: of several layers that are refused the first is named."""
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
        degree = self.degrees.tp
        for field in ("in_features", "out_features"):
            size = getattr(linear, field)
            if size % (MULTIPLE * degree):
                shared = f" on each of {degree} tensor-parallel ranks" if degree > 1 else ""
                raise ValueError(
                    f"{name} has {field}={size}: must be a multiple of {MULTIPLE}{shared}, or the "
                    "layer be named in filter_fqns"
                )
        if linear._forward_hooks or linear._forward_pre_hooks:
            raise ValueError(
                f"an earlier converter added to {name}, which Float8 would replace: Float8 must come "
                "before it"
            )


def _torchao_float8() -> Any:
    """Without what the import warns of: compiled parts for GPUs that do not load, and are not for this."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return import_module("torchao.float8")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_hardware(device: torch.device) -> None:
    if device.type == "meta":
        return
    advice = "emulate=True gives its rounding anywhere, slowly"
    if device.type != "cuda":
        raise ValueError(f"emulate=False: a {device.type} has no float8 products; {advice}")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise ValueError(
            f"emulate=False: {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, float8 products need {CAPABILITY[0]}.{CAPABILITY[1]}; {advice}"
        )
