"""Checks of a trainer's settings against each other, the model and the machine.

They run before anything is allocated. Errors name the options by their paths in `TrainerConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch

from losses.types import Loss
from rl.config.tree import check_fields, named_as_options
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig, check_async_tensor_parallel, check_compiler
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.stages import FOLDED, plan_stages
from rl.models.batch_invariant.model import ROW_MULTIPLE, check_batch_invariant_model
from rl.models.batch_invariant.probe import check_machine
from rl.models.decoder import Decoder, module_names
from rl.models.parallelize import check_decoder_layout
from rl.models.spec import ModelSpec
from rl.training.config import ExpertBalanceConfig, ReferenceConfig, TrainerConfig
from rl.training.memory import check_device_memory, estimate_memory


def check_trainer(
    config: TrainerConfig,
    *,
    spec: ModelSpec,
    world_size: int,
    device: torch.device,
) -> Degrees:
    """Return the degrees of a trainer of this model with `world_size` processes.

    Raises ValueError for a field that is out of range, or contradicts another field, the model or
    the machine.
    """
    check_fields(config)
    config.lr_scheduler.build()
    for check in trainer_checks(config, spec, world_size=world_size, device_type=device.type):
        check()
    degrees = config.parallelism.degrees(world_size)

    if spec.batch_invariant and device.type == "cpu":
        check_machine(
            spec.model,
            dtype=getattr(torch, config.training.param_dtype),
            max_rows=config.training.max_tokens_per_microbatch,
            tensor_parallel_degree=degrees.tp,
            float32_head=spec.float32_head,
        )

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        need = estimate_memory(config, spec=spec, degrees=degrees, on_gpu=True)
        check_device_memory(need, device_bytes=total, compiled=config.compile.enable)
    return degrees


def trainer_checks(
    config: TrainerConfig,
    spec: ModelSpec,
    *,
    world_size: int,
    device_type: str,
) -> Iterator[Callable[[], object]]:
    """Yield the checks, each of which raises ValueError.

    They need neither the trainer's processes nor its devices.
    """
    yield partial(_check_layout, config, spec)  # First what no number of processes could mend.
    yield partial(config.parallelism.degrees, world_size)
    if config.parallelism.async_tensor_parallel:
        yield partial(
            check_async_tensor_parallel,
            tensor_parallel_degree=config.parallelism.tensor_parallel_degree,
            compile_config=config.compile,
            device_type=device_type,
        )
    yield partial(check_compiler, config.compile, device_type=device_type)
    yield partial(check_experts, spec.model, balance=config.experts)
    yield partial(_check_limits, config, spec, device_type=device_type)
    yield partial(check_batch_invariant, config, spec)
    yield partial(_check_reference, config.loss, reference=config.reference)
    yield partial(_check_early_step, config)


def _check_layout(config: TrainerConfig, spec: ModelSpec) -> None:
    with named_as_options("parallelism", config.parallelism):
        check_decoder_layout(spec.model, config.parallelism)
    degree, dtype = config.parallelism.pipeline_parallel_degree, config.training.reduce_dtype
    if degree > 1:
        _check_split_backward(
            config.parallelism,
            model=spec.model,
            compile_config=config.compile,
            activation_checkpoint=config.activation_checkpoint,
        )
        if dtype != "float32":
            raise ValueError(
                f"training.reduce_dtype={dtype!r}: must be 'float32' with "
                f"parallelism.pipeline_parallel_degree={degree}, because FSDP would add the "
                "gradients of micro-batches in it"
            )


def _check_limits(config: TrainerConfig, spec: ModelSpec, *, device_type: str) -> None:
    """Raise ValueError for a setting beyond the model's layers or positions, or the device's
    abilities.
    """
    if config.checkpoint.async_mode == "async_with_pinned_mem" and device_type != "cuda":
        raise ValueError(
            "checkpoint.async_mode='async_with_pinned_mem': page-locked memory needs a GPU; "
            "without one use 'async'"
        )
    option, num_layers = config.activation_checkpoint.selective_option, spec.model.num_layers
    if option != "op" and int(option) > num_layers:
        raise ValueError(
            f"activation_checkpoint.selective_option={option!r}: must be 'op', or a number of "
            f"layers up to {str(num_layers)!r}, the layers of the model"
        )
    length, limit = config.training.max_sequence_length, spec.model.rope.max_positions
    if length is not None and length > limit:
        raise ValueError(
            f"training.max_sequence_length={length}: must be at most {limit}, the positions of "
            f"{spec.name} {spec.flavor}"
        )


def _check_split_backward(
    parallelism: ParallelismConfig,
    *,
    model: Decoder.Config,
    compile_config: CompileConfig,
    activation_checkpoint: ActivationCheckpointConfig,
) -> None:
    """Raise ValueError for options that fail where a block's backward is taken in two parts."""
    option, file = "pipeline_parallel_schedule", plan_stages(parallelism, module_names(model)).file
    splits = parallelism.pipeline_parallel_schedule == FOLDED
    if file is not None:
        option, splits = f"{option}_csv", file.splits_backward
    if not splits:
        return
    mode = activation_checkpoint.mode
    for name, value, is_valid, rule in (
        ("compile.enable", True, not compile_config.includes("model"), "False"),
        ("activation_checkpoint.mode", mode, mode == "none", "'none'"),
    ):
        if not is_valid:
            raise ValueError(
                f"{name}={value!r}: must be {rule} with "
                f"parallelism.{option}={getattr(parallelism, option)!r}, "
                "which takes the backwards of inputs and of weights apart"
            )


def _check_early_step(config: TrainerConfig) -> None:
    """Raise ValueError for options that need all gradients at once, with steps in the backward."""
    if not config.optimizer.early_step_in_backward:
        return
    training, degree = config.training, config.parallelism.pipeline_parallel_degree
    normalization = getattr(
        config.loss, "normalization", "none"
    )  # The first call checks other losses.
    for name, value, is_valid, rule in (
        (
            "optimizer.name",
            config.optimizer.name,
            config.optimizer.name != "Muon",
            "'AdamW' or 'Adam'",
        ),
        ("loss.normalization", normalization, normalization == "none", "'none'"),
        ("training.max_norm", training.max_norm, training.max_norm == float("inf"), "inf"),
        ("training.cpu_offload", training.cpu_offload, not training.cpu_offload, "False"),
        ("parallelism.pipeline_parallel_degree", degree, degree == 1, "1"),
    ):
        if not is_valid:
            raise ValueError(
                f"{name}={value!r}: must be {rule} with optimizer.early_step_in_backward=True, "
                "which steps a parameter before the other gradients are known"
            )


def _check_reference(loss: Loss, *, reference: ReferenceConfig) -> None:
    coef = getattr(loss, "kl_coef", 0.0)
    if coef and not reference.enable:
        raise ValueError(
            f"loss.kl_coef={coef} needs the reference policy: reference.enable must be True"
        )


def check_experts(model: Decoder.Config, *, balance: ExpertBalanceConfig) -> None:
    """Raise ValueError for expert options of a dense model."""
    if model.has_experts:
        return
    for f in dataclasses.fields(balance):
        value = getattr(balance, f.name)
        if value != f.default:
            raise ValueError(
                f"experts.{f.name}={value}: must be {f.default} for a model without experts"
            )


def check_batch_invariant(config: TrainerConfig, spec: ModelSpec) -> None:
    """Raise ValueError for options with which the trainer cannot compute the generator's bits."""
    if not spec.batch_invariant:
        return
    check_batch_invariant_model(spec.model)
    for number, converter in enumerate(config.converters):
        if not converter.owner.keeps_bits:
            raise ValueError(
                f"converters.{number}={converter.owner.__qualname__}: must not be there with "
                "batch_invariant=True, because the generator has the plain weights, whose products "
                "round differently"
            )
    parallelism, chunk = config.parallelism, config.training.logits_chunk_tokens
    tp, loss_parallel = parallelism.tensor_parallel_degree, parallelism.loss_parallel
    for name, value, is_valid, rule in (
        ("compile.enable", config.compile.enable, not config.compile.enable, "False"),
        # A sum over more than two ranks depends on the order that a collective takes.
        ("parallelism.tensor_parallel_degree", tp, tp <= 2, "at most 2"),
        # The generator normalises whole logits, in another order than sums over ranks.
        ("parallelism.loss_parallel", loss_parallel, not loss_parallel or tp == 1, "False"),
        (
            "training.logits_chunk_tokens",
            chunk,
            chunk is None or chunk % ROW_MULTIPLE == 0,
            f"None or a multiple of {ROW_MULTIPLE}",
        ),
    ):
        if not is_valid:
            raise ValueError(
                f"{name}={value}: must be {rule} with batch_invariant=True, to keep the bits"
            )
