"""Settings of the training engine, and their checks before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from rl.config.configurable import check_refused, refused, unless
from rl.config.tree import check_bounds, named_as_options
from rl.distributed.compile import check_async_tensor_parallel, check_compiler
from rl.distributed.stages import FOLDED, plan_stages
from rl.models.batch_invariant.model import ROW_MULTIPLE, check_batch_invariant_model
from rl.models.decoder import Decoder, module_names
from rl.models.parallelize import check_decoder_layout
from rl.models.spec import ModelSpec

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

Dtype = Literal["float32", "bfloat16"]


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Packing, precision, seeds and garbage collection of training."""

    max_tokens_per_microbatch: int = 16_384
    """Maximum number of tokens that are packed into one micro-batch."""
    max_sequences_per_microbatch: int | None = None
    """Maximum number of samples in a micro-batch; None for no limit."""
    share_prompts: bool = True
    """Send the prompt that samples of a micro-batch have in common through the model once; ignored with
    context parallelism by allgather or a mixture of experts."""
    global_batch_size: int | None = field(
        default=None,
        metadata=refused(
            "the loop decides how many samples an optimizer step takes: loop.groups_per_batch x loop.group_size / "
            "loop.num_minibatches"
        ),
    )
    """Samples of an optimizer step; refused."""
    max_sequence_length: int | None = None
    """Longest sample in tokens, prompt and completion; None for the positions that the model has."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are clipped; inf only measures the norm."""
    dtype: Dtype = "float32"
    """Dtype of the stored parameters, their accumulated gradients and the optimizer's state. A step in bfloat16 is
    computed in float32 and rounded at random, right on average: rounded to the nearest number, most of an update of
    1e-6 would be lost."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters in forward and backward."""
    reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks."""
    logits_chunk_tokens: int | None = None
    """Maximum number of tokens whose logits exist at once; None for the whole micro-batch."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, step the optimizer there, and copy blocks
    to the GPU one by one."""
    seed: int = 0
    """Seed of Python's, numpy's and PyTorch's generators, and of weights that no folder provides."""
    deterministic: bool = False
    """Use only kernels that return the same bits every time; slower on a GPU."""
    gc_every_steps: int = 0
    """Steps between garbage collections, which then run on all ranks at once; 0 leaves them to Python."""
    gc_debug: bool = field(default=False, metadata=unless("gc_every_steps", 0))
    """Log the number of objects that each of these collections freed, and its time."""

    def __post_init__(self) -> None:
        check_refused(self)
        check_bounds(self, "seed", at_least=0, below=2**63)
        check_bounds(
            self,
            "max_tokens_per_microbatch",
            "max_sequences_per_microbatch",
            "logits_chunk_tokens",
            at_least=1,
        )
        check_bounds(self, "max_sequence_length", at_least=2)
        check_bounds(self, "gc_every_steps", at_least=0)
        check_bounds(self, "max_norm", above=0)


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Settings of the reference policy."""

    enable: bool = False
    """Keep a frozen copy of the weights that training starts from, for a KL term; costs one more forward a step
    and, on each rank, the parameters' size in param_dtype."""


@dataclass(kw_only=True, slots=True)
class ExpertBalanceConfig:
    """Settings of the load balance of a mixture of experts."""

    load_balance_rate: float = 0.0
    """Change of an expert's bias after each optimizer step, against its load; 0 keeps the bias. 0.001 is
    usual for scores that sum to 1."""
    force_load_balance: bool = False
    """Send tokens to the experts in turn, ignoring the router; only for measurements, because the model's
    output is wrong and differs between layouts."""

    def __post_init__(self) -> None:
        check_bounds(self, "load_balance_rate", at_least=0, below=float("inf"))
        if self.load_balance_rate and self.force_load_balance:
            raise ValueError(
                f"load_balance_rate={self.load_balance_rate}: must be 0 with force_load_balance, which ignores "
                "scores and biases"
            )


# Checks against model, layout and machine


def trainer_checks(
    config: TrainingEngine.Config,
    spec: ModelSpec,
    *,
    world_size: int,
    device_type: str,
) -> Iterator[Callable[[], object]]:
    """Yield the checks, each of which raises ValueError; they need neither the trainer's processes nor devices."""
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
    yield partial(_check_reference, config)
    yield partial(_check_early_step, config)


def _check_layout(config: TrainingEngine.Config, spec: ModelSpec) -> None:
    with named_as_options("parallelism", config.parallelism):
        check_decoder_layout(spec.model, config.parallelism)
    degree, dtype = config.parallelism.pipeline_parallel_degree, config.training.reduce_dtype
    if degree > 1:
        _check_split_backward(config, spec)
        if dtype != "float32":
            raise ValueError(
                f"training.reduce_dtype={dtype!r}: must be 'float32' with "
                f"parallelism.pipeline_parallel_degree={degree}, because FSDP would add the gradients of micro-batches "
                "in it"
            )


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
    length, limit = config.training.max_sequence_length, spec.model.rope.max_positions
    if length is not None and length > limit:
        raise ValueError(
            f"training.max_sequence_length={length}: must be at most {limit}, the positions of {spec.name} "
            f"{spec.flavor}"
        )


def _check_split_backward(config: TrainingEngine.Config, spec: ModelSpec) -> None:
    """Raise ValueError for options that fail where a block's backward is taken in two parts."""
    parallelism = config.parallelism
    option, file = "pipeline_parallel_schedule", plan_stages(parallelism, module_names(spec.model)).file
    splits = parallelism.pipeline_parallel_schedule == FOLDED
    if file is not None:
        option, splits = f"{option}_csv", file.splits_backward
    if not splits:
        return
    mode = config.activation_checkpoint.mode
    for name, value, is_valid, rule in (
        ("compile.enable", True, not config.compile.includes("model"), "False"),
        ("activation_checkpoint.mode", mode, mode == "none", "'none'"),
    ):
        if not is_valid:
            raise ValueError(
                f"{name}={value!r}: must be {rule} with parallelism.{option}={getattr(parallelism, option)!r}, "
                "which takes the backwards of inputs and of weights apart"
            )


def _check_early_step(config: TrainingEngine.Config) -> None:
    """Raise ValueError for options that need all gradients at once, if parameters are stepped in the backward."""
    if not config.optimizer.early_step_in_backward:
        return
    training, degree = config.training, config.parallelism.pipeline_parallel_degree
    normalization = getattr(config.loss, "normalization", "none")  # The first call checks other losses.
    for name, value, is_valid, rule in (
        ("optimizer.name", config.optimizer.name, config.optimizer.name != "Muon", "'AdamW' or 'Adam'"),
        ("loss.normalization", normalization, normalization == "none", "'none'"),
        ("training.max_norm", training.max_norm, training.max_norm == float("inf"), "inf"),
        ("training.cpu_offload", training.cpu_offload, not training.cpu_offload, "False"),
        ("parallelism.pipeline_parallel_degree", degree, degree == 1, "1"),
    ):
        if not is_valid:
            raise ValueError(
                f"{name}={value!r}: must be {rule} with optimizer.early_step_in_backward=True, which steps a parameter "
                "before the other gradients are known"
            )


def _check_reference(config: TrainingEngine.Config) -> None:
    coef = getattr(config.loss, "kl_coef", 0.0)
    if coef and not config.reference.enable:
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
