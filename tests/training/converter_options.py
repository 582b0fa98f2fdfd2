"""What each rank measures of converters under options that must not change their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.models.converters.converter import ModelConverter
from rl.models.converters.float8 import Float8
from rl.models.converters.lora import LoRA
from tests.training.converter_layouts import RANK, even_spec, float8_samples
from tests.training.layout_options import Options
from tests.training.layouts import LAYOUTS, Tensors, whole_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    converters: str
    """lora, float8, or float8_lora."""
    options: Options


def row(
    converters: str, checkpoint: str, dtype: str, *, offload: bool = False, compiled: bool = False
) -> Row:
    options = Options(checkpoint=checkpoint, param_dtype=dtype, cpu_offload=offload, compiled=compiled)  # type: ignore[arg-type]
    return Row(converters=converters, options=options)


EAGER = (
    (
        row("lora", "none", "float32", offload=True),
        row("lora", "op", "bfloat16"),
        row("float8", "full", "bfloat16", offload=True),
        row("float8", "2", "float32"),
        row("float8_lora", "none", "bfloat16"),
        row("float8_lora", "full", "float32", offload=True),
    ),
    (
        row("lora", "full", "float32"),
        row("lora", "2", "bfloat16", offload=True),
        row("float8", "none", "bfloat16"),
        row("float8", "op", "float32", offload=True),
        row("float8_lora", "op", "bfloat16", offload=True),
        row("float8_lora", "2", "float32"),
    ),
)
"""Run in every second layout, and in the others."""
COMPILED = {
    "one": row("lora", "full", "bfloat16", compiled=True),
    "tp2": row("float8", "op", "float32", compiled=True),
    "fsdp2": row("float8_lora", "2", "float32", offload=True, compiled=True),
    "cp2": row("float8", "none", "float32", compiled=True),
}
"""Compiling takes long."""


def rows_of(layout: str) -> list[Row]:
    """What runs in this layout."""
    eager = EAGER[list(LAYOUTS).index(layout) % 2]
    return [*eager, COMPILED[layout]] if layout in COMPILED else list(eager)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    loss_sum: float
    gradients: Tensors
    """Of one call, not yet divided."""


def measure_converters(layout: str, adapter: str, rows: Sequence[Row]) -> list[Measured]:
    """`adapter` is a folder of LoRA's first adapter, in which no factor is zero."""
    engines = []
    measured = []
    for each in rows:
        if each.options.compiled:
            torch._dynamo.reset()
        config = each.options.config(layout)
        config.training.max_tokens_per_microbatch = 20
        config.converters = _converters(each.converters, adapter)
        engine = config.build(model_spec=even_spec(), hf_assets_path=None, device="cpu")
        engines.append(engine)
        result = engine.forward_backward(float8_samples())
        measured.append(Measured(loss_sum=result.loss_sum, gradients=whole_gradients(engine)))
    for engine in engines:
        engine.close()  # one of them made the process group that the later ones joined
    return measured


def _converters(name: str, adapter: str) -> tuple[ModelConverter.Config, ...]:
    # By row, as a context-parallel rank's tensor has a scale of its own.
    float8 = Float8.Config(emulate=True, recipe="rowwise")
    lora = LoRA.Config(rank=RANK, alpha=2.0 * RANK, initial_adapter=adapter)
    return {"lora": (lora,), "float8": (float8,), "float8_lora": (float8, lora)}[name]
