"""Settings of the training engine; `rl.training.checks` judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from losses.policy import GRPOLoss
from losses.types import Loss
from rl.config.configurable import Configurable, check_refused, refused, unless
from rl.config.tree import check_bounds
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import CommConfig
from rl.models.converter import ModelConverter
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.optimizer import LRSchedule, Optimizer

Dtype = Literal["float32", "bfloat16"]


def limit_samples(training: TrainingConfig, parallelism: ParallelismConfig) -> int | None:
    """Return the most samples of a micro-batch; None: no limit."""
    limits = (training.max_sequences_per_microbatch, parallelism.pipeline_parallel_microbatch_size)
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Packing, precision, seeds and garbage collection of training."""

    max_tokens_per_microbatch: int = 16_384
    """Maximum number of tokens that are packed into one micro-batch."""
    max_sequences_per_microbatch: int | None = None
    """Maximum number of samples in a micro-batch; None for no limit."""
    share_prompts: bool = True
    """Send the prompt that samples of a micro-batch have in common through the model once; ignored
    with context parallelism by allgather or a mixture of experts."""
    global_batch_size: int | None = field(
        default=None,
        metadata=refused(
            "the loop decides how many samples an optimizer step takes: loop.groups_per_batch x "
            "loop.group_size / loop.num_minibatches"
        ),
    )
    """Samples of an optimizer step; refused."""
    max_sequence_length: int | None = None
    """Longest sample in tokens, prompt and completion; None for the positions that the model has.
    """
    max_norm: float = 1.0
    """Gradient norm above which gradients are clipped; inf only measures the norm."""
    dtype: Dtype = "float32"
    """Dtype of the stored parameters, their accumulated gradients and the optimizer's state. A step
    in bfloat16 is computed in float32 and rounded at random, right on average: rounded to the
    nearest number, most of an update of 1e-6 would be lost."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters in forward and backward."""
    reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks."""
    logits_chunk_tokens: int | None = None
    """Maximum number of tokens whose logits exist at once; None for the whole micro-batch."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, step the optimizer there, and
    copy blocks to the GPU one by one."""
    seed: int = 0
    """Seed of Python's, numpy's and PyTorch's generators, and of weights that no folder provides.
    """
    deterministic: bool = False
    """Use only kernels that return the same bits every time; slower on a GPU."""
    gc_every_steps: int = 0
    """Steps between garbage collections, which then run on all ranks at once; 0 leaves them to
    Python.
    """
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
    """Keep a frozen copy of the weights that training starts from, for a KL term; costs one more
    forward a step and, on each rank, the parameters' size in param_dtype."""


@dataclass(kw_only=True, slots=True)
class ExpertBalanceConfig:
    """Settings of the load balance of a mixture of experts."""

    load_balance_rate: float = 0.0
    """Change of an expert's bias after each optimizer step, against its load; 0 keeps the bias.
    0.001 is usual for scores that sum to 1."""
    force_load_balance: bool = False
    """Send tokens to the experts in turn, ignoring the router; only for measurements, because the
    model's output is wrong and differs between layouts."""

    def __post_init__(self) -> None:
        check_bounds(self, "load_balance_rate", at_least=0, below=float("inf"))


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Configurable.Config):
    """Settings of `TrainingEngine`, where this class has the name `TrainingEngine.Config`.

    The class stands apart from the engine, because the checks and the memory estimate judge all
    settings together, and the engine imports both.
    """

    optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
    lr_scheduler: LRSchedule.Config = field(default_factory=LRSchedule.Config)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    loss: Loss = field(default_factory=GRPOLoss)
    """Loss of `forward_backward` calls that pass none."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    converters: tuple[ModelConverter.Config, ...] = ()
    """Changes to the model before it is sharded, in order: LoRA, Float8, Float8GroupedMM, your own.
    """
    print_after_conversion: bool = False
    """Log the model's modules after the converters, on the first rank at level INFO."""
    experts: ExpertBalanceConfig = field(default_factory=ExpertBalanceConfig)
