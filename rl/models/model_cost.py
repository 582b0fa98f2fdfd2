"""Arithmetic and activation memory of a decoder, counted from its shapes.

Work. A token's product with a matrix of n weights is 2 n operations in the forward, and as many again for the
gradient of its input and for the gradient of trained weights. Attention to one token is 4 operations per number
of a head in each layer, its product with the key and the sum of the values, and twice that in the backward.
Norms, rotations, activations and sampling are left out, and recomputation (activation checkpointing) is not
counted: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B, with attention limited by the causal mask.

Memory. What a block keeps for its backward, counted operation by operation of `rl.models.decoder`. Kernels differ
by device. On a GPU a norm keeps its input alone and attention is packed. On a CPU a norm keeps its input in
float32 and, for the gradient of its weight, the input divided by its root mean square; attention keeps the results
of single sequences and joins them.

Legend: E model width; Q = H D width of the queries (H heads of size D), K width of the keys and of the values,
F feed-forward width. A tensor-parallel rank holds T / tp of T tokens between the projections, at full width, and
all T tokens of its part of the width inside attention and feed-forward. Context-parallel ranks have T / cp of a
micro-batch's tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rl.distributed.mesh import Degrees
from rl.models.decoder import Decoder, FeedForward, TransformerBlock
from rl.models.low_rank import LowRank
from rl.models.moe import MoE

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """Sizes of the whole model, in numbers rather than bytes, independent of its layout."""

    parameters: int
    """All parameters."""
    products: float
    """Weights that one token is multiplied with: those of its experts only, the whole output head, and no
    embedding unless it is also the output head."""
    trained: float
    """The part of `products` that has a gradient."""
    attention: int
    """Layers x heads x head size."""
    cached: int
    """Numbers per token in the key-value cache."""
    read: int
    """Weights, including norms, that every decoding step reads regardless of its batch."""
    experts: int = 0
    """Weights of all experts; a step reads those that its tokens choose."""
    chosen: float = 0.0
    """Share of the experts that one token chooses."""

    def training_flops(self, *, tokens: float, attended: float) -> float:
        """Return the operations of forward and backward; `attended` is summed over the tokens."""
        return tokens * (4 * self.products + 2 * self.trained) + 12 * attended * self.attention

    def sampling_flops(self, *, tokens: float, attended: float) -> float:
        """Return the operations of the forward alone."""
        return 2 * tokens * self.products + 4 * attended * self.attention

    def sampling_bytes(self, *, steps: float, tokens: float, attended: float, itemsize: int) -> float:
        """Return the bytes read to sample the tokens: weights once a step, and each token's cache.

        Experts are assumed to be chosen uniformly at random.
        """
        unread = (1.0 - self.chosen) ** (tokens / steps) if steps else 1.0
        weights = steps * (self.read + self.experts * (1.0 - unread))
        return itemsize * (weights + attended * self.cached)


def model_work(model: Decoder.Config, *, converted: nn.Module | None = None) -> ModelWork:
    """Count the work of the model as it is sampled or, given the module after its converters, trained.

    The module may be on the meta device.
    """
    if converted is None:
        with torch.device("meta"):
            converted = model.build()
    assert isinstance(converted, Decoder)
    module = converted
    attention, feed_forward = model.block.attention, model.block.feed_forward
    chosen = 0.0
    if isinstance(feed_forward, MoE.Config):
        chosen = feed_forward.num_experts_per_token / feed_forward.num_experts
    shares = {p: _share_of_a_token(p, module, chosen=chosen) for p in module.parameters()}
    experts = sum(p.numel() for p in shares if p.ndim == 3)
    table = 0 if module.lm_head is None else module.embed_tokens.weight.numel()
    parameters = sum(p.numel() for p in shares)
    return ModelWork(
        parameters=parameters,
        products=sum(p.numel() * share for p, share in shares.items()),
        trained=sum(p.numel() * share for p, share in shares.items() if p.requires_grad),
        attention=model.num_layers * attention.num_heads * attention.head_dim,
        cached=2 * model.num_layers * attention.num_kv_heads * attention.head_dim,
        read=parameters - experts - table,
        experts=experts,
        chosen=chosen,
    )


def _share_of_a_token(parameter: nn.Parameter, module: Decoder, *, chosen: float) -> float:
    """Return the share of the parameter's weights that one token is multiplied with."""
    if parameter.ndim == 3:  # the stacked matrices of experts
        return chosen
    is_table = module.lm_head is not None and parameter is module.embed_tokens.weight
    return 0.0 if parameter.ndim < 2 or is_table else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """Activation bytes of one block on one rank, for one micro-batch."""

    whole: int
    """Kept without activation checkpointing."""
    selected: int
    """Kept by selective checkpointing by operation: results of products and attention, and the input."""
    recomputed: int
    """Recomputed by selective checkpointing."""
    input: int
    """Kept by full checkpointing."""


def block_memory(
    model: Decoder.Config,
    block: TransformerBlock,
    *,
    num_tokens: int,
    degrees: Degrees,
    itemsize: int,
    on_gpu: bool,
) -> BlockMemory:
    """Estimate the activations of a block that computes in a dtype of `itemsize` bytes.

    Every linear layer is taken to keep its input, though frozen layers without an adapter do not.

    Args:
        block: a block after the converters.
        num_tokens: tokens of a micro-batch on one context-parallel rank.
    """
    tp, width, attention = degrees.tp, model.dim, model.block.attention
    queries = attention.num_heads * attention.head_dim / tp
    keys = attention.num_kv_heads * attention.head_dim / tp
    norm = itemsize if on_gpu else FLOAT32 * (2 if block.attention_norm.weight.requires_grad else 1)
    # Two norms keep their inputs; their results are, under tensor parallelism, of all tokens.
    norms = 2 * norm * width / tp + 2 * itemsize * width
    rotated = (queries + keys) * itemsize
    if attention.qk_norm:
        # The input of the queries' norm is a copy; that of the keys' norm is a view of the projection if the
        # norm keeps it unchanged.
        view = itemsize if on_gpu or itemsize == FLOAT32 else 0
        rotated += norm * queries + (norm - view) * keys
    if on_gpu:
        # Keys and values are repeated for each query head, which is another copy.
        core = 2 * degrees.cp * max(queries, keys) + queries
    else:
        core = 2 * queries + (2 * degrees.cp * keys if degrees.cp > 1 else 0)
    log_sum_exp = attention.num_heads / tp * FLOAT32
    projected = (queries + 2 * keys) * itemsize
    hidden, products = _feed_forward(model, degrees)
    adapters = [module for module in block.modules() if isinstance(module, LowRank)]
    low = sum(adapter.lora_a.size(0) for adapter in adapters) * itemsize
    # What adapters add to results is a product too; here as if tensor parallelism split all of it.
    added = sum(adapter.lora_b.size(0) for adapter in adapters) / tp * itemsize
    whole = norms + projected + rotated + core * itemsize + log_sum_exp + hidden * itemsize + low
    # Results of all products. Output and down projection give all tokens, of which a tensor-parallel rank then
    # keeps its part.
    outputs = 2 * width * (1 + (1 / tp if tp > 1 else 0)) * itemsize
    block_input = width / tp * itemsize
    results = projected + queries * itemsize + log_sum_exp + products * itemsize
    selected = block_input + results + outputs + low + added
    return BlockMemory(
        whole=int(num_tokens * whole),
        selected=int(num_tokens * selected),
        recomputed=int(num_tokens * max(0, whole - selected)),
        input=int(num_tokens * block_input),
    )


def _feed_forward(model: Decoder.Config, degrees: Degrees) -> tuple[float, float]:
    """Return numbers per token: all that is kept, and the results of products among them.

    Kept are gate and up, silu(gate), and their product; the down projection's result counts with the block's.
    """
    feed_forward = model.block.feed_forward
    if not isinstance(feed_forward, MoE.Config):
        assert isinstance(feed_forward, FeedForward.Config)
        hidden = feed_forward.hidden_dim / degrees.tp
        return 4 * hidden, 2 * hidden
    # Whole experts see their rank's part of the tokens, split experts see all tokens.
    copies = feed_forward.num_experts_per_token / (1 if degrees.etp > 1 else degrees.tp)
    hidden = feed_forward.hidden_dim / degrees.etp
    # Kept are an expert's copy of a token, its result, and the result in the token's order. Selective
    # checkpointing also keeps the rows that expert-parallel ranks exchange, in both directions.
    exchanged = 2 * model.dim if degrees.ep > 1 else 0
    return copies * (4 * hidden + 3 * model.dim), copies * (2 * hidden + model.dim + exchanged)
