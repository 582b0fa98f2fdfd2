"""Checks of a trainer's config against its model, layout and machine, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from losses.types import Loss
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig, check_async_tensor_parallel, check_compiler
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models.batch_invariant.model import ROW_MULTIPLE, check_batch_invariant_model
from rl.models.batch_invariant.probe import check_machine
from rl.models.converter import ModelConverter
from rl.models.decoder import Decoder
from rl.models.float8 import Float8
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.training.config import ReferenceConfig, TrainingConfig
from rl.training.experts import ExpertBalance
from rl.training.policy import num_positions

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

LARGEST_INVARIANT_DEGREE = 2
"""Tensor-parallel degree up to which a sum over ranks has only one order."""


def check_layout(
    *,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    world_size: int,
    device_type: str,
) -> Degrees:
    """Return the degrees of a trainer with `world_size` processes.

    Raises:
        ValueError: a field contradicts the world size, the device or another field.
    """
    degrees = parallelism.degrees(world_size)
    activation_checkpoint.__post_init__()  # Callers may have edited fields.
    if parallelism.async_tensor_parallel:
        check_async_tensor_parallel(
            tensor_parallel_degree=degrees.tp, compile_config=compile, device_type=device_type
        )
    check_compiler(compile, device_type=device_type)
    return degrees


def check_selective_option(config: ActivationCheckpointConfig, *, num_layers: int) -> None:
    """Raise ValueError for checkpointing every n-th block of a model with fewer blocks."""
    option = config.selective_option
    if option != "op" and int(option) > num_layers:
        raise ValueError(
            f"activation_checkpoint.selective_option={option!r}: must be 'op', or a number of layers up to "
            f"{str(num_layers)!r}, the layers of the model"
        )


def check_sequence_length(spec: ModelSpec, training: TrainingConfig) -> None:
    """Raise ValueError if samples may be longer than the model has positions for."""
    length = training.max_sequence_length
    if length is not None and length > num_positions(spec):
        raise ValueError(
            f"max_sequence_length={length}: must be at most {num_positions(spec)}, the positions of "
            f"{spec.name} {spec.flavor}"
        )


def check_reference(config: ReferenceConfig, *, loss: Loss, kl_in_reward: bool = False) -> None:
    """Raise ValueError for a KL term without a reference policy, or a reference policy without a use.

    Args:
        kl_in_reward: True if rewards are reduced by the KL divergence from the reference policy.
    """
    in_loss = getattr(loss, "uses_reference", False)
    coef = getattr(loss, "kl_coef", 0.0)
    if config.enable and not in_loss and not kl_in_reward:
        raise ValueError(
            f"reference.enable=True has no effect with loss {type(loss).__name__}, which has no KL term: "
            "must be False, or a loss that has one"
        )
    if not config.enable and (kl_in_reward or (in_loss and coef)):
        needed_by = "a KL divergence in the reward" if kl_in_reward else f"loss.kl_coef={coef}"
        raise ValueError(f"{needed_by} needs the reference policy: reference.enable must be True")
    if config.enable or not dataclasses.is_dataclass(loss):
        return
    for f in dataclasses.fields(loss):
        if f.name.startswith("kl_") and getattr(loss, f.name) != f.default:
            raise ValueError(
                f"loss.{f.name}={getattr(loss, f.name)!r} has no effect without the reference policy: must be "
                f"{f.default!r}, or reference.enable True"
            )


def check_experts(
    model: Decoder.Config,
    *,
    balance: ExpertBalance.Config,
    converters: Sequence[ModelConverter.Config],
) -> None:
    """Raise ValueError for expert options of a dense model, and for Float8 with a mixture of experts."""
    if model.has_experts:
        if any(isinstance(converter, Float8.Config) for converter in converters):
            raise ValueError(
                "converters has Float8: must not for a model with experts, because it would leave their "
                "grouped products, most of the arithmetic, unchanged"
            )
        return
    for f in dataclasses.fields(balance):
        value = getattr(balance, f.name)
        if value != f.default:
            raise ValueError(f"experts.{f.name}={value}: must be {f.default} for a model without experts")


def check_batch_invariant(config: TrainingEngine.Config, spec: ModelSpec) -> None:
    """Raise ValueError for options with which the trainer cannot compute the generator's bits."""
    if not spec.batch_invariant:
        return
    check_batch_invariant_model(spec.model)
    for number, converter in enumerate(config.converters):
        if isinstance(converter, LoRA.Config | Float8.Config):
            name = type(converter).__qualname__.removesuffix(".Config")
            raise ValueError(
                f"converters.{number}={name}: must not be there with batch_invariant=True, because the "
                "generator has the plain weights, whose products round differently"
            )
    parallelism, chunk = config.parallelism, config.training.logits_chunk_tokens
    tp = parallelism.tensor_parallel_degree
    for name, value, is_refused, rule in (
        ("compile.enable", config.compile.enable, config.compile.enable, "False"),
        # A sum over more ranks depends on the order that a collective takes.
        ("parallelism.tensor_parallel_degree", tp, tp > LARGEST_INVARIANT_DEGREE, "at most 2"),
        # The generator normalises whole logits, in another order than sums over ranks.
        (
            "parallelism.loss_parallel",
            parallelism.loss_parallel,
            parallelism.loss_parallel and tp > 1,
            "False",
        ),
        (
            "training.logits_chunk_tokens",
            chunk,
            chunk is not None and chunk % ROW_MULTIPLE != 0,
            f"None or a multiple of {ROW_MULTIPLE}",
        ),
    ):
        if is_refused:
            raise ValueError(f"{name}={value}: must be {rule} with batch_invariant=True, to keep the bits")


def check_invariant_machine(
    config: TrainingEngine.Config, spec: ModelSpec, *, device: torch.device, tensor_parallel_degree: int
) -> None:
    """Run the model's layers on this CPU in the batch-invariant mode.

    Raises:
        ValueError: the rows of a layer depend on the number of rows.
    """
    if not spec.batch_invariant or device.type != "cpu":
        return
    check_machine(
        spec.model,
        dtype=getattr(torch, config.training.param_dtype),
        max_rows=config.training.max_tokens_per_microbatch,
        tensor_parallel_degree=tensor_parallel_degree,
    )
