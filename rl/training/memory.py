"""What a layout needs on each device, estimated before anything is allocated.

Parameters, gradients and optimizer state are exact up to the padding of shards; what FSDP gathers,
activations and logits are counted from the order in which a step does things. With compiled blocks
it is an upper bound: the compiler keeps fewer activations.

Legend: T tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe.model import GroupedExperts
from rl.training.activation_memory import FLOAT32, BlockMemory, block_memory
from rl.training.config import TrainingConfig
from rl.training.muon import is_hidden_matrix
from rl.training.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank of the trainer."""

    parameters: int
    gradients: int
    optimizer: int
    """State between steps."""
    reference: int
    """The frozen reference policy, if there is one."""
    gathered: int
    """What forward and backward hold of parameters and gradients beside this rank's own."""
    activations: int
    """Kept from forward to backward."""
    recomputed: int
    """Of the block whose activations are being computed again."""
    logits: int
    """And what the loss makes of them."""
    step: int
    """What the optimizer's step holds beside its state, when activations are gone."""

    @property
    def held(self) -> int:
        """Between steps, and in them."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """At the peak of a step: blocks are computed again when the logits are gone."""
        forward_backward = self.gathered + self.activations + max(self.logits, self.recomputed)
        return self.held + max(forward_backward, self.step)

    def describe(self) -> str:
        """One line, in GB."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        shown = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in parts.items() if value)
        return f"{self.total / 1e9:.3g} GB a rank at the peak ({shown})"


@dataclass(kw_only=True, slots=True)
class MemoryOptions:
    """What else of a trainer's config decides; each as in `TrainingEngine.Config`."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    reference: bool = False


def estimate(
    model: Qwen3.Config,
    *,
    degrees: Degrees,
    training: TrainingConfig,
    options: MemoryOptions | None = None,
    on_gpu: bool = True,
) -> MemoryEstimate:
    """Of `model` in this layout; `on_gpu` as kernels differ."""
    options = options or MemoryOptions()
    with torch.device("meta"):
        module = model.build()
    counts = _Counts.of(module, degrees)
    stored, computed = _size(training.dtype), _size(training.param_dtype)
    # What lives on the host is no burden of a GPU.
    kept_on_device = 0 if training.cpu_offload and on_gpu else 1
    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    block = block_memory(model, degrees=degrees, itemsize=computed, on_gpu=on_gpu)
    activations, recomputed = _activations(block, len(module.layers), options.activation_checkpoint)
    return MemoryEstimate(
        parameters=kept_on_device * counts.local * stored,
        gradients=kept_on_device * counts.local * stored,
        optimizer=kept_on_device * _optimizer_state(counts, options.optimizer) * stored,
        reference=kept_on_device * options.reference * counts.local * computed,
        gathered=_gathered(counts, degrees=degrees, training=training, parallelism=options.parallelism),
        # Embedding, the last norm's input and its result.
        activations=int(num_tokens * (activations + 4 * model.dim * computed)),
        recomputed=int(num_tokens * recomputed),
        logits=_logits(model, degrees=degrees, training=training, parallelism=options.parallelism),
        step=kept_on_device * _step(counts, options.optimizer) * stored,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """Of parameters on one rank."""

    local: int
    """Its shards."""
    local_matrices: int
    """Of them those that Muon steps."""
    gathered: int
    """All of one tensor-parallel rank."""
    root: int
    """Of them those outside the blocks."""
    block: int
    """Of a block those that are gathered at once."""
    experts: int
    """Of a block those of the experts where FSDP gathers these for themselves, under expert parallelism."""
    num_layers: int
    largest: int
    """Of the largest matrix, whole."""

    @classmethod
    def of(cls, module: nn.Module, degrees: Degrees) -> _Counts:
        parameters = dict(module.named_parameters())
        blocks = {name: p for name, p in parameters.items() if name.startswith("layers.")}
        matrices = [p for name, p in parameters.items() if is_hidden_matrix(name, p)]
        num_layers = len(module.layers)  # type: ignore[arg-type]
        experts = {
            p for part in module.modules() if isinstance(part, GroupedExperts) for p in part.parameters()
        }

        def share(part: Collection[nn.Parameter], *, num_shards: int, num_expert_shards: int) -> int:
            """Experts are split by their own degree of tensor parallelism."""
            num_experts = sum(p.numel() for p in part if p in experts)
            num_rest = sum(p.numel() for p in part if p not in experts)
            return math.ceil(
                num_rest / (degrees.tp * num_shards) + num_experts / (degrees.etp * num_expert_shards)
            )

        def shards(part: Collection[nn.Parameter]) -> int:
            return share(part, num_shards=degrees.fsdp, num_expert_shards=degrees.fsdp)

        def gathered(part: Collection[nn.Parameter]) -> int:
            # Under expert parallelism a rank gathers its own experts alone.
            return share(part, num_shards=1, num_expert_shards=degrees.ep)

        all_of_blocks = gathered(blocks.values())
        apart = gathered(experts) if degrees.ep > 1 else 0
        return cls(
            local=shards(parameters.values()),
            local_matrices=shards(matrices),
            gathered=gathered(parameters.values()),
            root=gathered([p for name, p in parameters.items() if name not in blocks]),
            block=(all_of_blocks - apart) // num_layers,
            experts=apart // num_layers,
            num_layers=num_layers,
            largest=max(p.numel() for p in matrices),
        )


def check_device_memory(estimated: MemoryEstimate, *, device_bytes: int) -> None:
    """Raise ValueError if a rank needs more than its device has."""
    if estimated.total > device_bytes:
        raise ValueError(
            f"the trainer needs {estimated.describe()}, its device has {device_bytes / 1e9:.3g} GB: raise "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree, lower "
            "training.max_tokens_per_microbatch, or set activation_checkpoint.mode or "
            "training.logits_chunk_tokens"
        )


def _optimizer_state(counts: _Counts, optimizer: Optimizer.Config) -> int:
    """Numbers: two means with Adam, one with Muon."""
    return 2 * counts.local - (counts.local_matrices if optimizer.name == "Muon" else 0)


def _step(counts: _Counts, optimizer: Optimizer.Config) -> int:
    """Numbers that the step itself holds for a while."""
    num_adam = counts.local - (counts.local_matrices if optimizer.name == "Muon" else 0)
    # foreach makes an intermediate result of all parameters at once: Adam's decayed gradient, then a root.
    adam = {"fused": 0, "foreach": num_adam, "for-loop": 2 * counts.largest}[optimizer.implementation]
    # Gathered, in Newton and Schulz's dtype a few times over, and as it is sent.
    muon = 6 * counts.largest if optimizer.name == "Muon" else 0
    return max(adam, muon)


def _gathered(
    counts: _Counts, *, degrees: Degrees, training: TrainingConfig, parallelism: ParallelismConfig
) -> int:
    computed, reduced = _size(training.param_dtype), _size(training.reduce_dtype)
    if degrees.dp_replicate * degrees.fsdp == 1 and not training.cpu_offload:
        # All parameters cast at once, where they are.
        return 0 if training.param_dtype == training.dtype else counts.gathered * computed
    never = parallelism.reshard_after_forward == "never"
    # Backward: the root, a block and the next one that is being gathered.
    parameters = counts.root + 2 * counts.block
    if never or (degrees.fsdp == 1 and not training.cpu_offload):
        parameters = counts.root + counts.num_layers * counts.block
    # Gradients of the root, whose sum is only complete at the end, and of a block, which are then copied
    # together to be summed over ranks.
    rest = (parameters + counts.root + counts.block) * computed + counts.block * reduced
    # Between the experts of two blocks come the rest of these: one's are gathered, and freed before their
    # gradients are copied. Where a rank holds its experts whole, they stay.
    if never or (degrees.fsdp == degrees.ep and not training.cpu_offload):
        return rest + counts.experts * ((counts.num_layers + 1) * computed + reduced)
    return rest + counts.experts * (computed + max(computed, reduced))


def _activations(
    block: BlockMemory, num_layers: int, checkpoint: ActivationCheckpointConfig
) -> tuple[float, float]:
    """Bytes for each token that all blocks keep, and that one computes again."""
    if checkpoint.mode == "none":
        return num_layers * block.whole, 0.0
    if checkpoint.mode == "full":
        return num_layers * block.input, block.whole
    if checkpoint.selective_option == "op":
        return num_layers * block.selected, block.whole - block.selected
    num_full = math.ceil(num_layers / int(checkpoint.selective_option))
    return num_full * block.input + (num_layers - num_full) * block.whole, block.whole


def _logits(
    model: Qwen3.Config, *, degrees: Degrees, training: TrainingConfig, parallelism: ParallelismConfig
) -> int:
    """The logits themselves, and three times in float32: their log-softmax, its exponential, its product
    with that for the entropy."""
    computed = _size(training.param_dtype)
    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    num_tokens = min(num_tokens, training.logits_chunk_tokens or num_tokens)
    own = model.vocab_size // degrees.tp
    if parallelism.loss_parallel or degrees.tp == 1:
        return num_tokens * own * (computed + 3 * FLOAT32)
    return num_tokens * (own * computed + model.vocab_size * (computed + 3 * FLOAT32))


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
