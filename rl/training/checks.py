"""Checks of a trainer's config against its model, layout and machine, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from losses.types import Loss
from rl.distributed.compile import check_async_tensor_parallel, check_compiler
from rl.models.batch_invariant.model import ROW_MULTIPLE, check_batch_invariant_model
from rl.models.decoder import Decoder
from rl.models.spec import ModelSpec
from rl.training.config import ExpertBalanceConfig, ReferenceConfig
from rl.training.policy import num_positions

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


def trainer_checks(
    config: TrainingEngine.Config,
    spec: ModelSpec,
    *,
    world_size: int,
    device_type: str,
) -> Iterator[Callable[[], object]]:
    """Yield checks, each of which raises ValueError, that need neither the trainer's processes nor its devices."""
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
    yield partial(check_reference, config.reference, loss=config.loss)


def _check_limits(config: TrainingEngine.Config, spec: ModelSpec, *, device_type: str) -> None:
    """Raise ValueError for a setting beyond the model's layers or positions, or the device's abilities."""
    if config.checkpoint.async_mode == "async_with_pinned_mem" and device_type != "cuda":
        raise ValueError(
            "checkpoint.async_mode='async_with_pinned_mem': page-locked memory needs a GPU; without one use 'async'"
        )
    option, num_layers = config.activation_checkpoint.selective_option, spec.model.num_layers
    if option != "op" and int(option) > num_layers:
        raise ValueError(
            f"activation_checkpoint.selective_option={option!r}: must be 'op', or a number of layers up to "
            f"{str(num_layers)!r}, the layers of the model"
        )
    length, limit = config.training.max_sequence_length, num_positions(spec)
    if length is not None and length > limit:
        raise ValueError(
            f"training.max_sequence_length={length}: must be at most {limit}, the positions of {spec.name} "
            f"{spec.flavor}"
        )


def check_reference(config: ReferenceConfig, *, loss: Loss) -> None:
    """Raise ValueError for a KL term without a reference policy."""
    coef = getattr(loss, "kl_coef", 0.0)
    if coef and not config.enable:
        raise ValueError(f"loss.kl_coef={coef} needs the reference policy: reference.enable must be True")


def check_experts(model: Decoder.Config, *, balance: ExpertBalanceConfig) -> None:
    """Raise ValueError for expert options of a dense model."""
    if model.has_experts:
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
        if not converter.owner.keeps_bits:
            raise ValueError(
                f"converters.{number}={converter.owner.__qualname__}: must not be there with "
                "batch_invariant=True, because the generator has the plain weights, whose products round differently"
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
            raise ValueError(f"{name}={value}: must be {rule} with batch_invariant=True, to keep the bits")
