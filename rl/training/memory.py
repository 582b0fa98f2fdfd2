"""Estimate of the memory that a layout needs on each device, before anything is allocated.

Parameters, gradients and optimizer state are exact up to the padding of shards; the rest is counted
from the shapes of the converted model, within 30% of a step's peak. For compiled blocks the
estimate is an upper bound, because the compiler keeps fewer activations.

Legend: E model width; Q and K widths of the queries and of the keys, F feed-forward width, each on
one tensor-parallel rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from losses.types import uses_entropy
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.stages import StagePlan, plan_stages
from rl.models.compat import VARLEN_TAKES_GROUPED_HEADS
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder, Elsewhere, list_module_names, take_part
from rl.models.low_rank.layer import find_adapted_weights
from rl.models.spec import ModelSpec
from rl.training.config import TrainerConfig, TrainingConfig
from rl.training.muon import is_hidden_matrix
from rl.training.optimizer import Optimizer
from rl.training.rounding import PIECE_BYTES, PIECE_NUMBERS

logger = logging.getLogger(__name__)

FLOAT32 = 4
"""Bytes."""
MARGIN = 1.3
"""Error of the estimated peak, as a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank of the trainer."""

    parameters: int
    """Weights, those of the reference policy included."""
    gradients: int
    optimizer: int
    """Optimizer state between steps."""
    gathered: int
    """Parameters and gradients beyond this rank's shards in forward and backward, and the shards'
    gradients if parameters are stepped in the backward: with a single micro-batch they never exist
    all at once.
    """
    activations: int
    """Activations kept from forward to backward."""
    recomputed: int
    """Activations of the block that is recomputed, after the logits are freed."""
    logits: int
    """Logits with the loss's intermediate results."""
    copies: int
    """Copies in the optimizer's step, or of the weights with merged adapters while weights are
    pushed.
    """

    @property
    def held(self) -> int:
        """Bytes held between steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        forward_backward = self.gathered + self.activations + max(self.logits, self.recomputed)
        return self.held + max(forward_backward, self.copies)

    def describe(self) -> str:
        """Return the total and its parts in GB as one line.

        Example:
            estimate.describe()
            # "42.1 GB a rank at the peak (parameters 15.3, gradients 15.3, activations 4.2, ...)"
        """
        parts: list[str] = []
        for name in self.__slots__:
            gigabytes = getattr(self, name) / 1e9
            if gigabytes:
                parts.append(f"{name} {gigabytes:.3g}")
        return f"{self.total / 1e9:.3g} GB a rank at the peak ({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _PipelineShare:
    """One rank's share of a pipeline; the defaults are those of a trainer without one."""

    num_held: float = 1.0
    """Micro-batches whose activations a rank keeps at once."""
    num_buffers: int = 0
    """Places for hidden states that other stages send, one for each micro-batch and neighbour."""
    num_copied: int = 0
    """Numbers of the last stage's copy of the embedding's weight, for a tied head."""
    has_logits: bool = True

    @classmethod
    def of(
        cls, plan: StagePlan, *, rank: int, model: Decoder.Config, parallelism: ParallelismConfig
    ) -> _PipelineShare:
        # A stage has a place for what it receives of each micro-batch, of which there are at least
        # as many as stages.
        last = len(plan.ranks) - 1
        num_places = 0
        for stage in plan.of_rank(rank):
            num_places += (stage > 0) + (stage < last)
        # The last stage has a copy of the embedding's weight, with a gradient and no optimizer
        # state.
        is_last = plan.ranks[-1] == rank
        return cls(
            num_held=plan.count_held(rank, schedule=parallelism.pipeline_parallel_schedule),
            num_buffers=(last + 1) * num_places,
            num_copied=model.vocab_size * model.dim if model.tie_embeddings and is_last else 0,
            has_logits=is_last,
        )


def estimate_memory(
    config: TrainerConfig,
    *,
    spec: ModelSpec,
    degrees: Degrees,
    on_gpu: bool,
) -> MemoryEstimate:
    """Return the memory of one rank, in a pipeline of the one that needs most.

    Kernels on a GPU keep other activations than those on a CPU.
    """
    plan = None
    if degrees.pp > 1:
        plan = plan_stages(config.parallelism, list_module_names(spec.model))
    estimates = []
    meta = torch.device("meta")
    for rank in range(degrees.pp):
        # Shapes alone, so that a laptop estimates a model of any size.
        with meta:
            module: Decoder = spec.model.build()
            converters = ModelConverters(config.converters, spec=spec, degrees=degrees, device=meta)
            converters.convert(module)
        share = _PipelineShare()
        if plan is not None:
            share = _PipelineShare.of(
                plan, rank=rank, model=spec.model, parallelism=config.parallelism
            )
            module = take_part(module, plan.list_modules(rank))
        estimates.append(
            _estimate_rank(config, module, share, spec=spec, degrees=degrees, on_gpu=on_gpu)
        )
    return max(estimates, key=lambda estimated: estimated.total)


def _estimate_rank(
    config: TrainerConfig,
    module: Decoder,
    share: _PipelineShare,
    *,
    spec: ModelSpec,
    degrees: Degrees,
    on_gpu: bool,
) -> MemoryEstimate:
    """Return the memory of a rank that has these modules of the converted model."""
    training, parallelism, on_rank = config.training, config.parallelism, _OnRank(module, degrees)
    stored, computed = _get_itemsize(training.dtype), _get_itemsize(training.param_dtype)
    # Offloaded tensors do not count on a GPU.
    kept_on_device = 0 if training.cpu_offload and on_gpu else 1

    # Held between steps.
    named = dict(module.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    num_copied_head = math.ceil(share.num_copied / (degrees.tp * degrees.fsdp))
    num_all = on_rank.count_sharded(named.values()) + num_copied_head
    num_merged = on_rank.count_sharded([weight for weight, _ in find_adapted_weights(module)])
    num_trained = on_rank.count_sharded(trained.values()) + num_copied_head
    gradients = kept_on_device * num_trained * stored

    # Needed in forward and backward, or in the step.
    of_backward = gradients if config.optimizer.early_step_in_backward else 0
    gathered = _count_gathered_bytes(on_rank, named, training=training, parallelism=parallelism)
    gathered += math.ceil(share.num_copied / degrees.tp) * 2 * computed
    state, of_step = _count_optimizer_bytes(
        on_rank, trained, optimizer=config.optimizer, training=training, on_gpu=on_gpu
    )

    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    kept, recomputed = _count_activation_bytes(
        module,
        degrees=degrees,
        itemsize=computed,
        on_gpu=on_gpu,
        checkpoint=config.activation_checkpoint,
        exchanges_heads=parallelism.exchanges_heads,
    )
    received = share.num_buffers * spec.model.dim * computed / degrees.tp
    logits = _count_logit_bytes(
        spec,
        num_tokens=num_tokens,
        training=training,
        num_parts=degrees.tp if parallelism.loss_parallel else 1,
        with_entropy=uses_entropy(config.loss),
        on_gpu=on_gpu,
    )
    return MemoryEstimate(
        parameters=kept_on_device * num_all * (stored + config.reference.enable * computed),
        gradients=gradients - of_backward,
        optimizer=kept_on_device * state,
        gathered=gathered + of_backward,
        activations=int(num_tokens * (share.num_held * kept + received)),
        recomputed=int(num_tokens * recomputed),
        logits=logits if share.has_logits else 0,
        copies=kept_on_device * max(of_step, num_merged * stored),
    )


def check_device_memory(estimated: MemoryEstimate, *, device_bytes: int, compiled: bool) -> None:
    """Check a rank against its device, like `check_memory`."""
    check_memory(
        estimated,
        message=f"the trainer needs {estimated.describe()}, its device has "
        f"{device_bytes / 1e9:.3g} GB: raise parallelism.data_parallel_shard_degree or "
        "tensor_parallel_degree, lower training.max_tokens_per_microbatch, or set "
        "activation_checkpoint.mode or training.logits_chunk_tokens",
        rank_bytes=device_bytes,
        compiled=compiled,
    )


def check_memory(
    estimated: MemoryEstimate, *, rank_bytes: float, message: str, compiled: bool
) -> None:
    """Raise ValueError if a rank certainly needs more than `rank_bytes`; log a warning if it may.

    Certain are the bytes held between steps and, unless the model is compiled, a peak beyond the
    margin of error.
    """
    if estimated.held > rank_bytes or (estimated.total > MARGIN * rank_bytes and not compiled):
        raise ValueError(message)
    if estimated.total > rank_bytes:
        logger.warning("%s. The peak is an estimate, so the run starts", message)


class _OnRank:
    """Division of a model's parameters over ranks."""

    def __init__(self, module: Decoder, degrees: Degrees) -> None:
        self.degrees = degrees
        self.layers = [block for block in module.layers if not isinstance(block, Elsewhere)]
        self._experts = {p for p in module.parameters() if p.ndim == 3}
        """The stacked matrices of experts."""

    def count_sharded(self, part: Collection[Tensor]) -> int:
        """Return the elements of one rank's shards."""
        return self._share(part, num_shards=self.degrees.fsdp, num_expert_shards=self.degrees.fsdp)

    def count_gathered(self, part: Collection[Tensor]) -> int:
        """Return the elements of one tensor-parallel rank, without data parallelism."""
        # Under expert parallelism a rank gathers only its own experts.
        return self._share(part, num_shards=1, num_expert_shards=self.degrees.ep)

    def _share(self, part: Collection[Tensor], *, num_shards: int, num_expert_shards: int) -> int:
        """Return the elements of one rank; experts have their own tensor-parallel degree.

        Tensor parallelism splits one of an adapter's two factors; here as if it split both.
        """
        num_experts = num_rest = 0
        for parameter in part:
            if parameter in self._experts:
                num_experts += parameter.numel()
            else:
                num_rest += parameter.numel()
        tp, etp = self.degrees.tp, self.degrees.etp
        return math.ceil(num_rest / (tp * num_shards) + num_experts / (etp * num_expert_shards))


def _count_optimizer_bytes(
    on_rank: _OnRank,
    trained: Mapping[str, Tensor],
    *,
    optimizer: Optimizer.Config,
    training: TrainingConfig,
    on_gpu: bool,
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state between steps, and of copies in its step."""
    stored, num_trained = _get_itemsize(training.dtype), on_rank.count_sharded(trained.values())
    # Adam keeps two running means, Muon one.
    by_muon: list[Tensor] = []
    if optimizer.name == "Muon":
        by_muon = [p for name, p in trained.items() if is_hidden_matrix(name, p)]
    num_adam = num_trained - on_rank.count_sharded(by_muon)
    copies = num_adam * stored if optimizer.implementation == "foreach" else 0
    if training.dtype == "bfloat16":  # Stepped piece by piece in float32.
        largest = max((on_rank.count_sharded([p]) for p in trained.values()), default=0)
        copies = min(PIECE_NUMBERS["cuda" if on_gpu else "cpu"], largest) * PIECE_BYTES
    return (num_trained + num_adam) * stored, copies


def _count_gathered_bytes(
    on_rank: _OnRank,
    named: Mapping[str, Tensor],
    *,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> int:
    """Return the bytes of gathered parameters, and of gradients that are not yet reduced."""
    degrees, reshard = on_rank.degrees, parallelism.reshard_after_forward
    computed, reduced = _get_itemsize(training.param_dtype), _get_itemsize(training.reduce_dtype)
    if degrees.dp_replicate * degrees.fsdp * degrees.pp == 1 and not training.cpu_offload:
        if training.param_dtype == training.dtype:
            return 0
        # All parameters are cast at once.
        return on_rank.count_gathered(named.values()) * computed

    stays = reshard == "never" or (degrees.fsdp == 1 and not training.cpu_offload)
    stays |= reshard == "default" and degrees.pp > 1
    num_layers = max(1, len(on_rank.layers))
    # In backward: the root, one block, and the next block that is being gathered. Their gradients:
    # those of the root, and those of a block, which are copied into one buffer.
    num_blocks = num_layers if stays else 2
    root: list[Tensor] = []
    blocks: list[Tensor] = []
    for name, parameter in named.items():
        if name.startswith("layers."):
            blocks.append(parameter)
        else:
            root.append(parameter)

    # torchao's wrapper casts a shard to one byte a number before its gather.
    in_float8 = on_rank.count_gathered([p for p in blocks if hasattr(p, "fsdp_pre_all_gather")])
    of_blocks = on_rank.count_gathered(blocks) * computed - in_float8 * (computed - 1)
    # In a pipeline those of all blocks wait for the end of the pass, and are then copied block by
    # block.
    num_waiting = num_layers if degrees.pp > 1 else 1
    num_trained = on_rank.count_gathered([p for p in blocks if p.requires_grad])
    block_gradients = num_trained * (computed * num_waiting + reduced)
    root_gradients = on_rank.count_gathered([p for p in root if p.requires_grad]) * computed
    return (
        on_rank.count_gathered(root) * computed
        + root_gradients
        + (num_blocks * of_blocks + block_gradients) // num_layers
    )


def _count_activation_bytes(
    module: Decoder,
    *,
    degrees: Degrees,
    itemsize: int,
    on_gpu: bool,
    checkpoint: ActivationCheckpointConfig,
    exchanges_heads: bool,
) -> tuple[float, float]:
    """Return the bytes that all blocks keep for each token, and those that one block recomputes."""
    blocks: list[Any] = [block for block in module.layers if not isinstance(block, Elsewhere)]
    width = module.config.dim
    ends = 4 * width * itemsize  # the embedding, and the last norm's input and result
    if not blocks:
        return float(ends), 0.0

    whole, results = _count_block_bytes(
        module,
        blocks[0],
        degrees=degrees,
        itemsize=itemsize,
        on_gpu=on_gpu,
        exchanges_heads=exchanges_heads,
    )
    block_input = itemsize * width / degrees.tp
    num_layers, every = len(blocks), checkpoint.selective_option
    if checkpoint.mode == "none":
        return ends + num_layers * whole, 0.0
    if checkpoint.mode == "full":
        return ends + num_layers * block_input, whole
    if every == "op":
        return ends + num_layers * (block_input + results), max(0.0, whole - results)
    num_full = math.ceil(num_layers / int(every))
    # Blocks that keep everything after the last checkpointed block are freed before it is
    # recomputed.
    is_last = (num_layers - 1) % int(every) == 0
    return ends + num_full * block_input + (num_layers - num_full) * whole, is_last * whole


def _count_block_bytes(
    module: Decoder,
    block: Any,
    *,
    degrees: Degrees,
    itemsize: int,
    on_gpu: bool,
    exchanges_heads: bool,
) -> tuple[float, float]:
    """Return the bytes that a block makes for each token, and those of its products alone."""
    model = module.config
    tp, width, attention = degrees.tp, model.dim, model.block.attention
    feed_forward: Any = model.block.feed_forward
    queries = attention.num_heads * attention.head_dim / tp
    keys = attention.num_kv_heads * attention.head_dim / tp
    if model.has_experts:
        # Whole experts see their rank's part of the tokens, split experts see all tokens.
        copies = feed_forward.num_experts_per_token / (1 if degrees.etp > 1 else tp)
        hidden = copies * feed_forward.hidden_dim / degrees.etp
        routed = copies * width
    else:
        copies, hidden, routed = 0.0, feed_forward.hidden_dim / tp, 0.0

    # A norm keeps its input; PyTorch's on a CPU in float32 and, for a trained weight, divided by
    # its root mean square.
    norm = FLOAT32 if model.norm_offset else itemsize
    if not on_gpu and (tp > 1 or model.norm_offset):
        norm = FLOAT32 * (1 + block.attention_norm.weight.requires_grad)
    norms = (2 + 2 * model.block.post_norms) * norm * width / tp + norm * (
        queries + keys
    ) * attention.qk_norm

    # Results of products, of rotation and attention (which a GPU gives copies of keys and values,
    # for each query head unless its kernel takes grouped heads), and of the feed-forward: gate and
    # up, silu(gate), and their product. Context parallelism gathers keys and values, unless it
    # exchanges heads, which is not kept.
    cp = 1 if exchanges_heads else degrees.cp
    copied = keys if VARLEN_TAKES_GROUPED_HEADS and itemsize < FLOAT32 else queries
    core = 2 * queries + 2 * cp * copied if on_gpu else 3 * queries + (cp > 1) * 2 * cp * keys
    whole = norms + itemsize * (
        2 * width + queries + keys + core + 2 * keys + 4 * hidden + 3 * routed
    )

    # Expert-parallel ranks, and ranks that exchange heads, send rows in both directions; an adapter
    # has a result like its layer, of each copy of a token if it is the experts'.
    exchanged = 2 * routed * (degrees.ep > 1) + 2 * (queries + keys) * exchanges_heads
    added = 0.0
    for _, adapter in find_adapted_weights(block):
        is_of_experts = adapter.lora_b.ndim == 3
        added += adapter.lora_b.size(-2) * (copies / degrees.etp if is_of_experts else 1 / tp)
    results = itemsize * (
        2 * width + 2 * queries + 2 * keys + 2 * hidden + routed + exchanged + added
    )
    return whole, results


def _count_logit_bytes(
    spec: ModelSpec,
    *,
    num_tokens: int,
    training: TrainingConfig,
    num_parts: int,
    with_entropy: bool,
    on_gpu: bool,
) -> int:
    """Return the bytes of logits, and of what `rl.models.logprobs` makes of them at once.

    With `float32_head` also of the head's copies in float32 and their gradients.

    Args:
        num_parts: ranks over which the vocabulary is split.
    """
    vocab_size, width = spec.model.vocab_size, spec.model.dim
    # Logits exist chunk by chunk; hidden states, of which a float32 head has copies, all at once.
    num_all, num_tokens = num_tokens, min(num_tokens, training.logits_chunk_tokens or num_tokens)
    # Quotient, log-softmax, its exponential and the entropy's product; of whole logits a CPU makes
    # few rows at once.
    num_copies = 3 if num_parts > 1 or with_entropy else 2 * on_gpu
    size, copies = _get_itemsize(training.param_dtype), 0
    if spec.float32_head and size < FLOAT32:
        size, copies = FLOAT32, 2 * FLOAT32 * width * (vocab_size // num_parts + num_all)
    return num_tokens * vocab_size // num_parts * (size + num_copies * FLOAT32) + copies


def _get_itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
