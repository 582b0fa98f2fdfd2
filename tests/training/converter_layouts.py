"""What each rank of a parallel layout does and measures with converters, for the tests of both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.distributed.shards import unwrapped
from rl.models.converters.converter import ModelConverter
from rl.models.converters.float8 import Float8
from rl.models.converters.lora import LoRA
from rl.models.converters.peft_folder import PeftSettings, write_peft_folder
from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock
from rl.models.spec import ModelSpec
from rl.training.engine import TrainingEngine
from rl.types import ForwardBackwardResult, OptimParams, OptimStepResult, TrainingSample
from tests.training.layouts import LAYOUTS, Tensors, to_numpy, whole_gradients, whole_parameters
from tests.training.parts import VOCAB, engine_config, make_sample, make_samples, small_spec

RANK = 3
UNEVEN = small_spec(tie=False)
"""For LoRA: its output head is adapted too."""
LAYERS = 2


def even_spec() -> ModelSpec:
    """Sizes that float8 can multiply, also on each of two tensor-parallel ranks."""
    model = Qwen3.Config(
        vocab_size=VOCAB,
        dim=32,
        num_layers=LAYERS,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, head_dim=16),
            feed_forward=FeedForward.Config(hidden_dim=64),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=64),
    )
    return dataclasses.replace(UNEVEN, model=model)


def write_adapter(folder: Path, spec: ModelSpec = UNEVEN, *, scale: float = 0.2) -> str:
    """With a B that is not zero, so that the gradient of A is not either."""
    assert isinstance(spec.model, Qwen3.Config)
    with torch.device("meta"):
        model = spec.model.build()
    adapter = spec.adapter(spec.model)
    generator = torch.Generator().manual_seed(8)
    factors = [
        (
            name,
            scale * torch.randn(RANK, weight.size(1), generator=generator),
            scale * torch.randn(weight.size(0), RANK, generator=generator),
        )
        for ours, parameter in model.named_parameters()
        for name, weight in adapter.to_hf(ours, parameter).items()
        if "proj" in name or "lm_head" in name
    ]
    settings = PeftSettings(rank=RANK, alpha=2.0 * RANK, target_modules=(), base_model=None)
    write_peft_folder(folder, factors, settings)
    return str(folder)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredLoRA:
    logprobs: list[np.ndarray]
    whole: ForwardBackwardResult
    gradients: Tensors
    """Of all samples in one call, not yet divided."""
    part_gradients: Tensors
    """Of three calls on parts."""
    steps: list[OptimStepResult]
    parameters: Tensors
    """After the steps; then a checkpoint, an adapter and the merged weights are written."""
    merged: Tensors
    num_dtensors: int
    """Among the merged tensors."""
    restored: OptimStepResult
    """A step from the checkpoint."""
    reopened: list[np.ndarray]
    """Logprobs from the adapter that was written, opened in an engine of its own."""
    trained: list[np.ndarray]
    """Logprobs when it was."""
    half: ForwardBackwardResult
    """Of all samples, computed in bfloat16 from the first weights."""


def lora(adapter: str | None = None) -> LoRA.Config:
    return LoRA.Config(rank=RANK, alpha=2.0 * RANK, unembedding=True, initial_adapter=adapter)


def make(
    layout: str,
    spec: ModelSpec,
    assets: str | None,
    converters: Sequence[ModelConverter.Config],
    **training: Any,
) -> TrainingEngine:
    config = engine_config(parallelism=LAYOUTS[layout][1], **training)
    config.converters = tuple(converters)
    return config.build(model_spec=spec, hf_assets_path=assets, device="cpu")


def measure_lora(layout: str, assets: str, adapter: str, folder: str) -> MeasuredLoRA:
    engine = make(layout, UNEVEN, assets, [lora(adapter)])
    samples = make_samples()
    logprobs = engine.compute_logprobs(samples)
    whole = engine.forward_backward(samples)
    gradients = whole_gradients(engine)
    engine.load_checkpoint(assets)
    for part in (samples[:2], samples[2:9], samples[9:]):
        engine.forward_backward(part)
    part_gradients = whole_gradients(engine)
    steps = [engine.optim_step()]
    for _ in range(2):
        engine.forward_backward(samples)
        steps.append(engine.optim_step())
    parameters = whole_parameters(engine)
    merged = engine.model_state_dict()
    trained = engine.compute_logprobs(samples)
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.save_adapter(f"{folder}/adapter")
    engine.export_hf(f"{folder}/merged")
    engine.load_checkpoint(assets)
    engine.load_checkpoint(f"{folder}/checkpoint")
    engine.forward_backward(samples)
    restored = engine.optim_step()

    half_engine = make(layout, UNEVEN, assets, [lora(adapter)], param_dtype="bfloat16")
    half = half_engine.forward_backward(samples)
    half_engine.load_checkpoint(f"{folder}/adapter")
    reopened_engine = make(layout, UNEVEN, assets, [lora(f"{folder}/adapter")])
    reopened = reopened_engine.compute_logprobs(samples)
    return MeasuredLoRA(
        logprobs=logprobs,
        whole=whole,
        gradients=gradients,
        part_gradients=part_gradients,
        steps=steps,
        parameters=parameters,
        merged={name: to_numpy(tensor) for name, tensor in merged.items()},
        num_dtensors=sum(isinstance(tensor, DTensor) for tensor in merged.values()),
        restored=restored,
        trained=trained,
        reopened=reopened,
        half=half,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredFloat8:
    whole: ForwardBackwardResult
    gradients: Tensors
    steps: list[OptimStepResult]
    parameters: Tensors
    """After the steps, as the plain model has them."""
    scales: dict[str, list[tuple[float, float]]]
    """Of each weight whose scale is computed ahead, that and what it must be: after a step, and after a
    checkpoint of another step was read."""
    losses: list[float]
    """After the steps, and then with all scales computed ahead made ten times as large."""
    num_tokens: set[int]
    """Of what a float8 layer multiplied."""


def float8_samples() -> list[TrainingSample]:
    """Each alone in a micro-batch, so that what shares a scale does not depend on the layout."""
    return [make_sample(length=12 + i % 8, seed=200 + i) for i in range(6)]


def measure_float8(layout: str, converters: Sequence[ModelConverter.Config], folder: str) -> MeasuredFloat8:
    """Three steps; after the second a checkpoint is written and read."""
    engine = make(layout, even_spec(), None, converters, max_tokens_per_microbatch=20)
    # A gradient that is nothing but rounding, as that of a product with a factor 0, shall make no whole step;
    # of weights in float8 whole steps are just what has the same bits in every layout.
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
    return MeasuredFloat8(
        whole=whole,
        gradients=gradients,
        steps=steps,
        parameters=parameters,
        scales=scales,
        losses=losses,
        num_tokens=num_tokens,
    )


def scale_ahead(parameter: Tensor) -> Tensor | None:
    """What FSDP's next gathering in float8 multiplies this shard by, if that was computed ahead."""
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return getattr(shard, "_precomputed_scale", None)


def weight_scales(engine: TrainingEngine) -> list[tuple[float, float]]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return [
        (float(scale), largest / float(np.abs(to_numpy(unwrapped(parameter.detach()))).max()))
        for parameter in engine.policy.parameters.values()
        if (scale := scale_ahead(parameter)) is not None
    ]


GATHERED = Float8.Config(
    emulate=True, enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True
)
FLOAT8: dict[str, tuple[ModelConverter.Config, ...]] = {
    "tensorwise": (Float8.Config(emulate=True),),
    "rowwise": (Float8.Config(emulate=True, recipe="rowwise"),),
    "rowwise_with_gw_hp": (Float8.Config(emulate=True, recipe="rowwise_with_gw_hp"),),
    "with_lora": (Float8.Config(emulate=True), LoRA.Config(rank=RANK)),
    "gathered": (GATHERED,),
    "gathered_scaled_when_needed": (Float8.Config(emulate=True, enable_fsdp_float8_all_gather=True),),
    "gathered_with_lora": (GATHERED, LoRA.Config(rank=RANK)),
}
KINDS = {
    "fsdp2": ("rowwise", "gathered", "gathered_scaled_when_needed", "gathered_with_lora"),
    "tp2": ("tensorwise", "rowwise_with_gw_hp", "with_lora"),
    "ddp2": ("tensorwise", "with_lora"),
    "fsdp2_tp2": ("gathered", "gathered_with_lora"),
    "hsdp2x2": ("gathered", "rowwise"),
    "cp2": ("rowwise", "tensorwise", "gathered"),
}
"""What is measured in each layout; shards are gathered in float8 only where there are some."""


def has_scales_of_its_own(layout: str, kind: str) -> bool:
    """Whether a tensor whose scale is one has other values than on one device: a context-parallel rank's
    tokens."""
    return LAYOUTS[layout][1].context_parallel_degree > 1 and not kind.startswith("rowwise")


def ungathered(kind: str) -> str:
    """The kind that gives the same numbers on one device."""
    same = {"gathered": "tensorwise", "gathered_scaled_when_needed": "tensorwise"}
    return same.get(kind, kind.removeprefix("gathered_"))


def measure_all(
    layout: str, assets: str, adapter: str, folder: str
) -> tuple[MeasuredLoRA, dict[str, MeasuredFloat8]]:
    kinds = KINDS.get(layout) or sorted({ungathered(kind) for kinds in KINDS.values() for kind in kinds})
    return measure_lora(layout, assets, adapter, folder), {
        kind: measure_float8(layout, FLOAT8[kind], f"{folder}/{kind}") for kind in kinds
    }
