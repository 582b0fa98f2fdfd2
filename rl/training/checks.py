"""Checks of a trainer's settings against the rules between options, the model and the machine.

They run before anything is allocated. Errors name the options by their paths in `TrainerConfig`,
those of rules by their paths in a run (`trainer.optimizer.name`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from rl.config.rules import check_rules, select_rules
from rl.config.tree import check_fields, name_as_options
from rl.distributed.compile import CompileConfig, check_async_tensor_parallel, check_compiler
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.process_group import World
from rl.distributed.stages import plan_stages
from rl.models.batch_invariant.model import check_batch_invariant_model
from rl.models.batch_invariant.probe import check_machine, has_equal_bits
from rl.models.decoder import Decoder, list_module_names
from rl.models.parallelize import check_decoder_layout
from rl.models.spec import ModelSpec
from rl.run_rules import RULES
from rl.training.config import ExpertBalanceConfig, TrainerConfig
from rl.training.memory import check_device_memory, estimate_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerAlone:
    """The part of a run's config that a trainer without a run has, as the rules see it."""

    trainer: TrainerConfig
    batch_invariant: bool


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
    # A script may have edited fields since the config was made, and nobody else judges them.
    check_fields(config)
    config.lr_scheduler.build()
    for check in list_trainer_checks(config, spec, world_size=world_size, device_type=device.type):
        check()
    degrees = config.parallelism.resolve_degrees(world_size)

    # Which kernel a CPU library takes depends on the machine, so that bits are compared here.
    if spec.batch_invariant and device.type == "cpu":
        check_machine(
            spec.model,
            dtype=getattr(torch, config.training.param_dtype),
            max_rows=config.training.max_tokens_per_microbatch,
            tensor_parallel_degree=degrees.tp,
            float32_head=spec.float32_head,
        )

    # Before anything is allocated, as an allocation that fails later ends the run in the middle.
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        need = estimate_memory(config, spec=spec, degrees=degrees, on_gpu=True)
        check_device_memory(need, device_bytes=total, compiled=config.compile.enable)
    return degrees


def find_thread_check(
    config: TrainerConfig, *, spec: ModelSpec, world: World, num_threads: int
) -> Callable[[], bool] | None:
    """Return what tells whether gradients have the same bits on one thread and on `num_threads`.

    None: they need not, since only the batch-invariant mode on a CPU promises anything of bits, or
    the products are others than those that a test would look at.
    """
    on_cpu = world.default_device().type == "cpu"
    if not (spec.batch_invariant and on_cpu) or config.converters or config.compile.enable:
        return None
    return partial(
        has_equal_bits,
        spec.model,
        dtype=getattr(torch, config.training.param_dtype),
        max_rows=config.training.max_tokens_per_microbatch,
        num_threads=num_threads,
        tensor_parallel_degree=config.parallelism.resolve_degrees(world.size).tp,
        float32_head=spec.float32_head,
        gradients=True,
    )


def list_trainer_checks(
    config: TrainerConfig, spec: ModelSpec, *, world_size: int, device_type: str
) -> Iterator[Callable[[], object]]:
    """Yield all checks of a trainer alone, each of which raises ValueError.

    They need neither the trainer's processes nor its devices.
    """
    # First, as other checks build parts of the model with options that a rule may refuse.
    yield partial(check_trainer_rules, config, batch_invariant=spec.batch_invariant)
    yield from list_model_checks(config, spec, world_size=world_size, device_type=device_type)


def check_trainer_rules(config: TrainerConfig, *, batch_invariant: bool) -> None:
    """Raise ValueError for the first broken rule between the options of a trainer."""
    alone = TrainerAlone(trainer=config, batch_invariant=batch_invariant)
    check_rules(alone, select_rules(RULES, "trainer", "batch_invariant"))


def list_model_checks(
    config: TrainerConfig, spec: ModelSpec, *, world_size: int, device_type: str
) -> Iterator[Callable[[], object]]:
    """Yield the checks against the model and the device; a run checks its rules by itself."""
    # First what no number of processes could mend.
    yield partial(
        _check_layout,
        spec.model,
        parallelism=config.parallelism,
        compile_config=config.compile,
        checkpointing=config.activation_checkpoint.mode,
    )
    yield partial(config.parallelism.resolve_degrees, world_size)
    if config.parallelism.async_tensor_parallel:
        yield partial(
            check_async_tensor_parallel,
            tensor_parallel_degree=config.parallelism.tensor_parallel_degree,
            compile_config=config.compile,
            device_type=device_type,
        )
    yield partial(check_compiler, config.compile, device_type=device_type)
    serves_apart = any(converter.is_served_apart for converter in config.converters)
    yield partial(check_experts, spec.model, balance=config.experts, serves_apart=serves_apart)
    yield partial(
        _check_limits,
        spec,
        async_mode=config.checkpoint.async_mode,
        selective_option=config.activation_checkpoint.selective_option,
        max_sequence_length=config.training.max_sequence_length,
        device_type=device_type,
    )
    if spec.batch_invariant:
        # Kernels for the mode exist for some models only.
        yield partial(check_batch_invariant_model, spec.model)


def _check_layout(
    model: Decoder.Config,
    *,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    checkpointing: str,
) -> None:
    """Raise ValueError for a layout that does not fit the model, and for options that fail with the
    schedule of a file.

    The same holds of schedules with a name, about which `rl.run_rules` has a rule.
    """
    with name_as_options("parallelism", parallelism):
        check_decoder_layout(model, parallelism)
    if parallelism.pipeline_parallel_degree == 1:
        return

    file = plan_stages(parallelism, list_module_names(model)).file
    if file is None or not file.splits_backward:
        return
    path = parallelism.pipeline_parallel_schedule_csv
    reason = (
        f"with parallelism.pipeline_parallel_schedule_csv={path!r}, because the schedule takes the "
        "backwards of inputs and of weights apart"
    )
    if compile_config.includes("model"):
        raise ValueError(f"compile.enable=True: must be False {reason}")
    if checkpointing != "none":
        raise ValueError(f"activation_checkpoint.mode={checkpointing!r}: must be 'none' {reason}")


def _check_limits(
    spec: ModelSpec,
    *,
    async_mode: str,
    selective_option: str,
    max_sequence_length: int | None,
    device_type: str,
) -> None:
    """Raise ValueError for a setting beyond the model's layers or positions, or the device's
    abilities.
    """
    if async_mode == "async_with_pinned_mem" and device_type != "cuda":
        raise ValueError(
            "checkpoint.async_mode='async_with_pinned_mem': page-locked memory needs a GPU; "
            "without one use 'async'"
        )
    num_layers, num_positions = spec.model.num_layers, spec.model.rope.max_positions
    if selective_option != "op" and int(selective_option) > num_layers:
        raise ValueError(
            f"activation_checkpoint.selective_option={selective_option!r}: must be 'op', or a "
            f"number of layers up to {str(num_layers)!r}, the layers of the model"
        )
    if max_sequence_length is not None and max_sequence_length > num_positions:
        raise ValueError(
            f"training.max_sequence_length={max_sequence_length}: must be at most {num_positions}, "
            f"the positions of {spec.name} {spec.flavor}"
        )


def check_experts(
    model: Decoder.Config, *, balance: ExpertBalanceConfig, serves_apart: bool = False
) -> None:
    """Raise ValueError for expert options of a dense model, and for biases that do not travel.

    Args:
        serves_apart: generators keep the weights of the start and get adapters alone.
    """
    if model.has_experts:
        if serves_apart and balance.load_balance_rate:
            raise ValueError(
                f"experts.load_balance_rate={balance.load_balance_rate}: must be 0 with LoRA, "
                "whose generators keep the biases of the start; or set merge=True in LoRA"
            )
        return
    for f in dataclasses.fields(balance):
        value = getattr(balance, f.name)
        if value != f.default:
            raise ValueError(
                f"experts.{f.name}={value}: must be {f.default} for a model without experts"
            )
