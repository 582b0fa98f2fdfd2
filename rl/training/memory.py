"""What a layout needs on each device, estimated before anything is allocated.

Parameters, gradients and optimizer state are exact up to the padding of shards; what FSDP gathers,
activations and logits are counted from the order in which a step does things. The model is the one
that is trained, after its converters: what LoRA freezes has neither gradient nor state. Float8 adds
nothing that stays: inputs and weights are kept as they are, and cast for one product at a time. With
compiled blocks it is an upper bound: the compiler keeps fewer activations.

Legend: T tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models.converters.converter import ModelConverters
from rl.models.qwen3.model import Qwen3, TransformerBlock
from rl.training.activation_memory import FLOAT32, BlockMemory, block_memory
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.training.parameter_counts import ParameterCounts

logger = logging.getLogger(__name__)


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
    """Of the block whose activations are being computed again, beyond those of later blocks, which are
    gone by then."""
    logits: int
    """And what the loss makes of them, or the gradient of the head's weight that it makes instead."""
    reduced: int
    """Gradients outside the blocks as FSDP sums them over ranks, when activations are gone."""
    step: int
    """What the optimizer's step holds beside its state, when activations are gone."""
    merged: int
    """Copies of the weights with their adapters, when weights are pushed."""

    @property
    def held(self) -> int:
        """Between steps, and in them."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """At the peak of a step: blocks are computed again when the logits are gone."""
        forward_backward = self.gathered + self.activations + max(self.logits, self.recomputed)
        return self.held + max(forward_backward, self.reduced, self.step, self.merged)

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
    entropy_gradient: bool = False
    """Whether the loss uses it (`losses.types.uses_entropy`)."""
    converters: ModelConverters | None = None
    """Made for this estimate alone."""


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
        if options.converters is not None:
            options.converters.convert(module)
    counts = ParameterCounts.of(module, degrees)
    stored, computed = _size(training.dtype), _size(training.param_dtype)
    # What lives on the host is no burden of a GPU.
    kept_on_device = 0 if training.cpu_offload and on_gpu else 1
    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    first: TransformerBlock = module.layers[0]
    block = block_memory(
        model, first, num_tokens=num_tokens, degrees=degrees, itemsize=computed, on_gpu=on_gpu
    )
    activations, recomputed = _activations(block, counts.num_layers, options.activation_checkpoint)
    is_sharded = _has_fsdp(degrees, training)
    return MemoryEstimate(
        parameters=kept_on_device * counts.local * stored,
        gradients=kept_on_device * counts.trained * stored,
        optimizer=kept_on_device * _optimizer_state(counts, options.optimizer) * stored,
        reference=kept_on_device * options.reference * counts.local * computed,
        gathered=_gathered(counts, degrees=degrees, training=training, parallelism=options.parallelism),
        # Embedding, the last norm's input and its result.
        activations=activations + 4 * num_tokens * model.dim * computed,
        recomputed=recomputed,
        logits=_logits(module, degrees=degrees, training=training, options=options),
        reduced=is_sharded * counts.root.trained * (computed + _size(training.reduce_dtype)),
        step=kept_on_device * _step(counts, options.optimizer) * stored,
        merged=kept_on_device * _merged(counts, stored=stored),
    )


def check_device_memory(estimated: MemoryEstimate, *, device_bytes: int, compiled: bool) -> None:
    """Whether a rank's device has what it needs.

    Raises:
        ValueError: names both sizes and what would need less; as `too_large`.
    """
    if estimated.total > device_bytes:
        too_large(
            f"the trainer needs {estimated.describe()}, its device has {device_bytes / 1e9:.3g} GB: raise "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree, lower "
            "training.max_tokens_per_microbatch, or set activation_checkpoint.mode or "
            "training.logits_chunk_tokens",
            compiled=compiled,
        )


def too_large(message: str, *, compiled: bool) -> None:
    """Raise ValueError; log a warning where the model is compiled, of which the estimate is only an upper
    bound."""
    if not compiled:
        raise ValueError(message)
    logger.warning("%s. Compiled it may need less: the run starts", message)


def _optimizer_state(counts: ParameterCounts, optimizer: Optimizer.Config) -> int:
    """Numbers: two means with Adam, one with Muon."""
    return 2 * counts.trained - (counts.trained_matrices if optimizer.name == "Muon" else 0)


def _step(counts: ParameterCounts, optimizer: Optimizer.Config) -> int:
    """Numbers that the step itself holds for a while."""
    num_adam = counts.trained - (counts.trained_matrices if optimizer.name == "Muon" else 0)
    # foreach makes an intermediate result of all parameters at once: Adam's decayed gradient, then a root.
    adam = {"fused": 0, "foreach": num_adam, "for-loop": 2 * counts.largest}[optimizer.implementation]
    # Gathered, in Newton and Schulz's dtype a few times over, and as it is sent.
    muon = 6 * counts.largest if optimizer.name == "Muon" else 0
    return max(adam, muon)


def _merged(counts: ParameterCounts, *, stored: int) -> int:
    """All of them are pushed together; the last one's product, scaled and added, is in float32."""
    return counts.merged * stored + 2 * counts.largest_merged * FLOAT32


def _has_fsdp(degrees: Degrees, training: TrainingConfig) -> bool:
    return degrees.dp_replicate * degrees.fsdp > 1 or training.cpu_offload


def _gathered(
    counts: ParameterCounts, *, degrees: Degrees, training: TrainingConfig, parallelism: ParallelismConfig
) -> int:
    computed, reduced = _size(training.param_dtype), _size(training.reduce_dtype)
    if not _has_fsdp(degrees, training):
        # All parameters cast at once, where they are.
        return 0 if training.param_dtype == training.dtype else counts.gathered * computed
    never = parallelism.reshard_after_forward == "never"
    stays = never or (degrees.fsdp == 1 and not training.cpu_offload)
    # Backward: the root, a block and the next one that is being gathered.
    num_blocks = counts.num_layers if stays else 2
    parameters = counts.root.num_bytes(computed) + num_blocks * counts.block.num_bytes(computed)
    # Gradients of the head, summed only when the root's last one is there, and of a block, which are then
    # copied together to be summed over ranks.
    gradients = counts.head * computed + counts.block.trained * (computed + reduced)
    # Between the experts of two blocks come the rest of these: one's are gathered, and freed before their
    # gradients are copied. Where a rank holds its experts whole, they stay.
    experts, of_experts = counts.experts.num_bytes(computed), counts.experts.trained
    if never or (degrees.fsdp == degrees.ep and not training.cpu_offload):
        of_blocks = counts.num_layers * experts + of_experts * (computed + reduced)
    else:
        of_blocks = of_experts * computed + max(experts, of_experts * reduced)
    return parameters + gradients + of_blocks


def _activations(
    block: BlockMemory, num_layers: int, checkpoint: ActivationCheckpointConfig
) -> tuple[int, int]:
    """Bytes that all blocks keep, and that one computes again beyond what is gone by then."""
    if checkpoint.mode == "none":
        return num_layers * block.whole, 0
    if checkpoint.mode == "full":
        return num_layers * block.input, block.whole
    if checkpoint.selective_option == "op":
        return num_layers * block.selected, block.recomputed
    every = int(checkpoint.selective_option)
    num_full = math.ceil(num_layers / every)
    # Where blocks that keep everything come after the last of the others, they are gone before it.
    is_last = (num_layers - 1) % every == 0
    return num_full * block.input + (num_layers - num_full) * block.whole, is_last * block.whole


def _logits(module: Qwen3, *, degrees: Degrees, training: TrainingConfig, options: MemoryOptions) -> int:
    """The logits themselves, and three times in float32: their log-softmax, its exponential, its product
    with that for the entropy. Where the entropy has a gradient, four times in float32 in the backward: the
    log-softmax, its two gradients and their sum. When only their gradient is left, that of the weight."""
    computed = _size(training.param_dtype)
    num_all = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    num_tokens = min(num_all, training.logits_chunk_tokens or num_all)
    vocab_size, dim = module.config.vocab_size, module.config.dim
    own = vocab_size // degrees.tp
    is_split = options.parallelism.loss_parallel and degrees.tp > 1
    each = computed + 3 * FLOAT32
    if options.entropy_gradient and not is_split:
        each = max(each, 4 * FLOAT32)
    if options.parallelism.loss_parallel or degrees.tp == 1:
        logits = num_tokens * own * each
    else:
        logits = num_tokens * (own * computed + vocab_size * each)
    weight = module.embed_tokens.weight if module.lm_head is None else module.lm_head.weight
    has_adapter = module.lm_head_lora is not None
    if not weight.requires_grad and not has_adapter:
        return logits
    # The first chunk's, the next one's and their sum; or of all tokens at once.
    num_gradients = 3 if num_tokens < num_all else 1
    if _has_fsdp(degrees, training) and not has_adapter:
        num_gradients -= 1  # is counted with what is gathered
    size = own * dim * computed
    # The adapter's sum with the weight is there from the forward on.
    return max(logits, num_tokens * own * computed + num_gradients * size) + has_adapter * size


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
