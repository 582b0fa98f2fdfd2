"""What a training engine cannot do in the batch-invariant mode, and whether its machine can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl.models.batch_invariant.model import check_batch_invariant_model
from rl.models.batch_invariant.probe import check_machine
from rl.models.batch_invariant.rows import ROW_MULTIPLE
from rl.models.converters.converter import ModelConverter
from rl.models.converters.float8 import Float8
from rl.models.converters.lora import LoRA
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec

if TYPE_CHECKING:
    from rl.training.engine_config import EngineConfig

LARGEST_TENSOR_PARALLEL_DEGREE = 2
"""Two numbers have one sum; of more, each collective has an order of its own."""


def check_batch_invariant(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError for what cannot give the generator's bits; nothing where the mode is off."""
    if not spec.batch_invariant:
        return
    check_batch_invariant_model(spec.model)  # type: ignore[arg-type]
    _check_converters(config.converters)
    parallelism, chunk = config.parallelism, config.training.logits_chunk_tokens
    for name, value, fault, rule in (
        (
            "compile.enable",
            config.compile.enable,
            config.compile.enable,
            "must be False with batch_invariant=True: compiled kernels round in orders of their own",
        ),
        (
            "parallelism.tensor_parallel_degree",
            parallelism.tensor_parallel_degree,
            parallelism.tensor_parallel_degree > LARGEST_TENSOR_PARALLEL_DEGREE,
            f"must be at most {LARGEST_TENSOR_PARALLEL_DEGREE} with batch_invariant=True: sums over "
            "more ranks depend on the order that a collective takes",
        ),
        (
            "parallelism.loss_parallel",
            parallelism.loss_parallel,
            parallelism.loss_parallel and parallelism.tensor_parallel_degree > 1,
            "must be False with batch_invariant=True and tensor parallelism: the generator normalises whole "
            "logits, in another order than sums over ranks",
        ),
        (
            "training.logits_chunk_tokens",
            chunk,
            chunk is not None and chunk % ROW_MULTIPLE != 0,
            f"must be a multiple of {ROW_MULTIPLE} with batch_invariant=True, or None",
        ),
    ):
        if fault:
            raise ValueError(f"{name}={value}: {rule}")


def _check_converters(converters: Sequence[ModelConverter.Config]) -> None:
    """Others may freeze or change weights: the generator gets those."""
    for number, converter in enumerate(converters):
        if isinstance(converter, LoRA.Config | Float8.Config):
            name = type(converter).__qualname__.removesuffix(".Config")
            raise ValueError(
                f"converters.{number}={name}: must not be there with batch_invariant=True: the generator has "
                "the plain weights, whose products round differently"
            )


def check_trainers_machine(
    config: EngineConfig, spec: ModelSpec, *, device: torch.device, tensor_parallel_degree: int
) -> None:
    """Try the model's layers here; nothing where the mode is off, or on a GPU.

    Raises:
        ValueError: a layer whose rows depend on their number.
    """
    if not spec.batch_invariant or device.type != "cpu":
        return
    model: Qwen3.Config = spec.model  # type: ignore[assignment]
    check_machine(
        model,
        dtype=getattr(torch, config.training.param_dtype),
        max_rows=config.training.max_tokens_per_microbatch,
        tensor_parallel_degree=tensor_parallel_degree,
    )
