"""Estimate of the memory that a layout needs on each device, before anything is allocated.

Parameters, gradients and optimizer state are exact up to the padding of shards; gathered parameters, activations
and logits are counted from the order of operations in a step. The model is the converted one: weights that LoRA
freezes have neither gradient nor state, and Float8 casts inputs and weights only for one product at a time. For
compiled blocks the estimate is an upper bound, because the compiler keeps fewer activations.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from losses.types import uses_entropy
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import Degrees
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder, TransformerBlock
from rl.models.low_rank import adapted_layers
from rl.models.model_cost import FLOAT32, BlockMemory, block_memory
from rl.models.moe import GroupedExperts
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.muon import is_hidden_matrix
from rl.training.optimizer import Optimizer

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank of the trainer."""

    parameters: int
    gradients: int
    optimizer: int
    """Optimizer state between steps."""
    reference: int
    """Weights of the reference policy."""
    gathered: int
    """Parameters and gradients beyond this rank's shards in forward and backward."""
    activations: int
    """Activations kept from forward to backward."""
    recomputed: int
    """Activations of the block that is recomputed, beyond those of later blocks, which are freed by then."""
    logits: int
    """Logits with the loss's intermediate results, or the gradient of the head's weight if that is larger."""
    reduced: int
    """Gradients outside the blocks while FSDP sums them over ranks, after activations are freed."""
    step: int
    """Intermediate results of the optimizer's step."""
    merged: int
    """Copies of the weights with merged adapters while weights are pushed."""

    @property
    def held(self) -> int:
        """Bytes held between steps."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """Bytes at the peak of a step; blocks are recomputed after the logits are freed."""
        forward_backward = self.gathered + self.activations + max(self.logits, self.recomputed)
        return self.held + max(forward_backward, self.reduced, self.step, self.merged)

    def describe(self) -> str:
        """Return the total and its parts in GB as one line."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        shown = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in parts.items() if value)
        return f"{self.total / 1e9:.3g} GB a rank at the peak ({shown})"


def estimate(
    spec: ModelSpec,
    config: TrainingEngine.Config,
    *,
    degrees: Degrees,
    converters: ModelConverters | None = None,
    on_gpu: bool = True,
) -> MemoryEstimate:
    """Return the memory of one rank; kernels on a GPU keep other activations than those on a CPU.

    Args:
        converters: converters on the meta device, built for this estimate.
    """
    model, training, optimizer = spec.model, config.training, config.optimizer
    with torch.device("meta"):
        module = model.build()
        if converters is not None:
            converters.convert(module)
    parameters = _Parameters(module, degrees)
    stored, computed = _size(training.dtype), _size(training.param_dtype)
    # Offloaded tensors do not count on a GPU.
    kept_on_device = 0 if training.cpu_offload and on_gpu else 1
    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    first: TransformerBlock = module.layers[0]
    block = block_memory(
        model, first, num_tokens=num_tokens, degrees=degrees, itemsize=computed, on_gpu=on_gpu
    )
    activations, recomputed = _activations(block, len(module.layers), config.activation_checkpoint)
    local, trained = parameters.shards(parameters.all), parameters.shards(parameters.trained)
    # Adam keeps two running means, Muon one.
    by_muon = parameters.shards(parameters.matrices) if optimizer.name == "Muon" else 0
    num_reduced = parameters.gathered_trained(parameters.root) if _has_fsdp(degrees, training) else 0
    return MemoryEstimate(
        parameters=kept_on_device * local * stored,
        gradients=kept_on_device * trained * stored,
        optimizer=kept_on_device * (2 * trained - by_muon) * stored,
        reference=kept_on_device * config.reference.enable * local * computed,
        gathered=_gathered(parameters, degrees=degrees, config=config),
        # The embedding, and the last norm's input and result.
        activations=activations + 4 * num_tokens * model.dim * computed,
        recomputed=recomputed,
        logits=_logits(module, degrees=degrees, config=config),
        reduced=num_reduced * (computed + _size(training.reduce_dtype)),
        step=kept_on_device * _step(parameters, optimizer, num_adam=trained - by_muon) * stored,
        merged=kept_on_device * _merged(parameters, stored=stored),
    )


def check_device_memory(estimated: MemoryEstimate, *, device_bytes: int, compiled: bool) -> None:
    """Raise ValueError if a rank needs more memory than its device has; only warn for a compiled model."""
    if estimated.total > device_bytes:
        too_large(
            f"the trainer needs {estimated.describe()}, its device has {device_bytes / 1e9:.3g} GB: raise "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree, lower "
            "training.max_tokens_per_microbatch, or set activation_checkpoint.mode or "
            "training.logits_chunk_tokens",
            compiled=compiled,
        )


def too_large(message: str, *, compiled: bool) -> None:
    """Raise ValueError, or log a warning for a compiled model, whose estimate is an upper bound."""
    if not compiled:
        raise ValueError(message)
    logger.warning("%s. The compiled model may need less, so the run starts", message)


def _step(parameters: _Parameters, optimizer: Optimizer.Config, *, num_adam: int) -> int:
    """Return the elements of the step's intermediate results."""
    largest = max((p.numel() for p in parameters.matrices or parameters.trained), default=0)
    # foreach has one intermediate result for all parameters at once: the decayed gradient, then a root.
    adam = {"fused": 0, "foreach": num_adam, "for-loop": 2 * largest}[optimizer.implementation]
    # The gathered matrix, a few copies in the dtype of the iteration, and the broadcast update.
    muon = 6 * largest if optimizer.name == "Muon" else 0
    return max(adam, muon)


def _merged(parameters: _Parameters, *, stored: int) -> int:
    """Return the bytes of merged copies of adapted weights, and of the last product in float32."""
    largest = max((parameters.shards([weight]) for weight in parameters.adapted), default=0)
    return parameters.shards(parameters.adapted) * stored + 2 * largest * FLOAT32


def _has_fsdp(degrees: Degrees, training: TrainingConfig) -> bool:
    return degrees.dp_replicate * degrees.fsdp > 1 or training.cpu_offload


def _gathered(parameters: _Parameters, *, degrees: Degrees, config: TrainingEngine.Config) -> int:
    training = config.training
    computed, reduced = _size(training.param_dtype), _size(training.reduce_dtype)
    if not _has_fsdp(degrees, training):
        # All parameters are cast at once.
        return 0 if training.param_dtype == training.dtype else parameters.gathered(parameters.all) * computed
    never = config.parallelism.reshard_after_forward == "never"
    stays = never or (degrees.fsdp == 1 and not training.cpu_offload)
    # In backward: the root, one block, and the next block that is being gathered.
    num_layers = parameters.num_layers
    num_blocks = num_layers if stays else 2
    blocks = num_blocks * parameters.gathered_bytes(parameters.blocks, computed, among=num_layers)
    # Gradients of the head, which are summed only with the root's last gradient, and of a block, which are
    # copied into one buffer to be summed over ranks.
    of_block = parameters.gathered_trained(parameters.blocks, among=num_layers)
    gradients = parameters.gathered_trained(parameters.head) * computed + of_block * (computed + reduced)
    # The experts of one block are gathered at a time and freed before their gradients are copied. Experts that
    # a rank holds whole stay.
    experts = parameters.gathered_bytes(parameters.experts_apart, computed, among=num_layers)
    of_experts = parameters.gathered_trained(parameters.experts_apart, among=num_layers)
    if never or (degrees.fsdp == degrees.ep and not training.cpu_offload):
        of_blocks = num_layers * experts + of_experts * (computed + reduced)
    else:
        of_blocks = of_experts * computed + max(experts, of_experts * reduced)
    return parameters.gathered_bytes(parameters.root, computed, among=1) + blocks + gradients + of_blocks


def _activations(
    block: BlockMemory, num_layers: int, checkpoint: ActivationCheckpointConfig
) -> tuple[int, int]:
    """Return the bytes that all blocks keep, and those that one block recomputes."""
    if checkpoint.mode == "none":
        return num_layers * block.whole, 0
    if checkpoint.mode == "full":
        return num_layers * block.input, block.whole
    if checkpoint.selective_option == "op":
        return num_layers * block.selected, block.recomputed
    every = int(checkpoint.selective_option)
    num_full = math.ceil(num_layers / every)
    # Blocks that keep everything after the last checkpointed block are freed before it is recomputed.
    is_last = (num_layers - 1) % every == 0
    return num_full * block.input + (num_layers - num_full) * block.whole, is_last * block.whole


def _logits(module: Decoder, *, degrees: Degrees, config: TrainingEngine.Config) -> int:
    """Return the bytes of logits, the loss's intermediate results and the head's gradient.

    The forward holds the logits and, in float32, their log-softmax, its exponential and the product of both for
    the entropy. An entropy gradient holds four float32 tensors in backward: the log-softmax, its two gradients
    and their sum.
    """
    training, loss_parallel = config.training, config.parallelism.loss_parallel
    computed = _size(training.param_dtype)
    num_all = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    num_tokens = min(num_all, training.logits_chunk_tokens or num_all)
    vocab_size, dim = module.config.vocab_size, module.config.dim
    own = vocab_size // degrees.tp
    is_split = loss_parallel and degrees.tp > 1
    each = computed + 3 * FLOAT32
    if uses_entropy(config.loss) and not is_split:
        each = max(each, 4 * FLOAT32)
    if loss_parallel or degrees.tp == 1:
        logits = num_tokens * own * each
    else:
        logits = num_tokens * (own * computed + vocab_size * each)
    weight = module.embed_tokens.weight if module.lm_head is None else module.lm_head.weight
    has_adapter = module.lm_head_lora is not None
    if not weight.requires_grad and not has_adapter:
        return logits
    # Gradients of the first chunk, the next chunk and their sum, or of all tokens at once.
    num_gradients = 3 if num_tokens < num_all else 1
    if _has_fsdp(degrees, training) and not has_adapter:
        num_gradients -= 1  # counted in `gathered`
    size = own * dim * computed
    # The sum of weight and adapter exists from the forward on.
    return max(logits, num_tokens * own * computed + num_gradients * size) + has_adapter * size


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


class _Parameters:
    """Parameters of the converted model, and their division over ranks."""

    def __init__(self, module: Decoder, degrees: Degrees) -> None:
        named = dict(module.named_parameters())
        self.degrees = degrees
        self.num_layers = len(module.layers)
        self.all = list(named.values())
        self.trained = [p for p in self.all if p.requires_grad]
        self.matrices = [p for name, p in named.items() if p.requires_grad and is_hidden_matrix(name, p)]
        """Trained parameters that Muon steps."""
        self.adapted = [linear.weight for linear, _ in adapted_layers(module)]
        self._experts = {
            p for part in module.modules() if isinstance(part, GroupedExperts) for p in part.parameters()
        }
        self.root = [p for name, p in named.items() if not name.startswith("layers.")]
        in_layers = [p for name, p in named.items() if name.startswith("layers.")]
        self.experts_apart = [p for p in in_layers if p in self._experts and degrees.ep > 1]
        """Experts that FSDP gathers separately, under expert parallelism."""
        apart = set(self.experts_apart)
        self.blocks = [p for p in in_layers if p not in apart]
        embedding = module.embed_tokens.weight if module.lm_head is not None else None
        self.head = [p for p in self.root if p is not embedding]
        """The root without an embedding that is no output head; backward starts with these."""

    def shards(self, part: Collection[Tensor]) -> int:
        """Return the elements of one rank's shards."""
        return self._share(part, num_shards=self.degrees.fsdp, num_expert_shards=self.degrees.fsdp)

    def gathered(self, part: Collection[Tensor]) -> int:
        """Return the elements of one tensor-parallel rank, without data parallelism."""
        # Under expert parallelism a rank gathers only its own experts.
        return self._share(part, num_shards=1, num_expert_shards=self.degrees.ep)

    def gathered_trained(self, part: Collection[Tensor], *, among: int = 1) -> int:
        """Return the gathered elements with a gradient, of one of `among` equal parts."""
        return self.gathered([p for p in part if p.requires_grad]) // among

    def gathered_bytes(self, part: Collection[Tensor], itemsize: int, *, among: int) -> int:
        """Return the bytes of one of `among` equal parts; torchao's wrapper casts a shard before its gather."""
        in_float8 = self.gathered([p for p in part if hasattr(p, "fsdp_pre_all_gather")]) // among
        return (self.gathered(part) // among - in_float8) * itemsize + in_float8

    def _share(self, part: Collection[Tensor], *, num_shards: int, num_expert_shards: int) -> int:
        """Return the elements of one rank; experts have their own tensor-parallel degree.

        Tensor parallelism splits one of an adapter's two factors; here as if it split both.
        """
        num_experts = sum(p.numel() for p in part if p in self._experts)
        num_rest = sum(p.numel() for p in part) - num_experts
        tp, etp = self.degrees.tp, self.degrees.etp
        return math.ceil(num_rest / (tp * num_shards) + num_experts / (etp * num_expert_shards))
