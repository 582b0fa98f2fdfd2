"""Measurements of one rank of a parallel layout with float8 products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.distributed.sharding import unwrapped
from rl.models.converter import ModelConverter
from rl.models.float8 import Float8
from rl.models.lora import LoRA
from rl.training.engine import TrainingEngine
from rl.types import OptimParams
from tests.training.layouts import float8_samples, join, parallelism, to_numpy, whole_gradients
from tests.training.parts import RANK, engine_config, even_spec

GATHERED = Float8.Config(
    emulate=True, enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True
)
FLOAT8: dict[str, tuple[ModelConverter.Config, ...]] = {
    "tensorwise": (Float8.Config(emulate=True),),
    "with_lora": (Float8.Config(emulate=True), LoRA.Config(rank=RANK)),
    "gathered": (GATHERED,),
    "gathered_scaled_when_needed": (Float8.Config(emulate=True, enable_fsdp_float8_all_gather=True),),
    "gathered_with_lora": (GATHERED, LoRA.Config(rank=RANK)),
}
KINDS = {
    "fsdp2": ("gathered", "gathered_scaled_when_needed", "gathered_with_lora"),
    "tp2": ("tensorwise", "with_lora"),
}
"""Kinds measured in each layout; float8 all-gathers only where parameters are sharded. Scales by row, and context
parallelism, are among the cases of `test_layout_options.py`."""


def ungathered(kind: str) -> str:
    """Return the kind that gives the same numbers on one device."""
    same = {"gathered": "tensorwise", "gathered_scaled_when_needed": "tensorwise"}
    return same.get(kind, kind.removeprefix("gathered_"))


def measure_all(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    join("fsdp2")
    return {
        (layout, kind): measure(layout, FLOAT8[kind], f"{folder}/{layout}_{kind}")
        for layout, kinds in KINDS.items()
        for kind in kinds
    }


def measure(layout: str, converters: Sequence[ModelConverter.Config], folder: str) -> dict[str, Any]:
    """Take three steps, with a checkpoint written and loaded after the second."""
    config = engine_config(parallelism=parallelism(layout), max_tokens_per_microbatch=20)
    config.converters = tuple(converters)
    engine = config.build(model_spec=even_spec(), hf_assets_path=None, device="cpu")
    # A gradient of mere rounding, as behind a factor of 0, must not make a whole step. In float8 only whole
    # steps have the same bits in every layout.
    params = OptimParams(eps=1e-3) if len(converters) > 1 else None
    samples = float8_samples()
    num_tokens: set[int] = set()
    layer = engine.policy.model.get_submodule("layers.0.feed_forward.down_proj")
    handle = layer.register_forward_pre_hook(lambda _, inputs: num_tokens.add(inputs[0].size(0)))
    whole = engine.forward_backward(samples)
    handle.remove()
    gradients = whole_gradients(engine)
    steps = [engine.optim_step(params)]
    engine.forward_backward(samples)
    steps.append(engine.optim_step(params))
    engine.save_checkpoint(folder)
    engine.forward_backward(samples)
    engine.optim_step(params)
    scales = {"stepped": weight_scales(engine)}
    engine.load_checkpoint(folder)
    scales["loaded"] = weight_scales(engine)
    engine.forward_backward(samples)
    steps.append(engine.optim_step(params))
    parameters = {name: to_numpy(tensor) for name, tensor in engine.model_state_dict().items()}
    losses = [engine.forward_backward(samples).loss_sum]
    for parameter in engine.policy.parameters.values():
        if (scale := scale_ahead(parameter)) is not None:
            scale.mul_(10.0)
    losses.append(engine.forward_backward(samples).loss_sum)
    engine.close()
    return {
        "whole": whole,
        "gradients": gradients,
        "norms": [step.grad_norm for step in steps],
        "parameters": parameters,
        "scales": scales,
        "losses": losses,
        "num_tokens": num_tokens,
    }


def scale_ahead(parameter: Tensor) -> Tensor | None:
    """Return the precomputed scale that FSDP's next float8 all-gather applies to this shard, if there is
    one."""
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return getattr(shard, "_precomputed_scale", None)


def weight_scales(engine: TrainingEngine) -> list[tuple[float, float]]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return [
        (float(scale), largest / float(np.abs(to_numpy(unwrapped(parameter.detach()))).max()))
        for parameter in engine.policy.parameters.values()
        if (scale := scale_ahead(parameter)) is not None
    ]
