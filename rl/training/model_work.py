"""What a model has to compute and to read, counted from its shapes, whatever computes it.

A token's product with a matrix of n weights is 2 n operations forward, and as many again for the gradient
of its input and for that of the weights, where these are trained. Attention to one token is 4 operations for
each number of a head in each layer: its product with the key, and the sum of the values; twice that backward.
Norms, rotations, activations and the draw are left out, and nothing is counted twice that is computed twice
(activation checkpointing): Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B, with attention to the
tokens that a causal mask shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe.model import MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """Numbers, not bytes; of the whole model, whatever its layout."""

    parameters: int
    """All."""
    products: float
    """Weights that one token is multiplied with: of a mixture those of its experts, of the output head all,
    of an embedding that is no output head none."""
    trained: float
    """Of these, weights that have a gradient."""
    attention: int
    """Layers x heads x size of a head."""
    cached: int
    """Numbers that the key-value cache has for one token."""
    read: int
    """Weights that a step of decoding reads whatever its batch, norms among them."""
    experts: int = 0
    """Weights of all experts, of which a step reads those that its tokens choose."""
    chosen: float = 0.0
    """Share of the experts that one token chooses."""

    def training_flops(self, *, tokens: float, attended: float) -> float:
        """Forward and backward of so many tokens, which attend to so many all together."""
        return tokens * (4 * self.products + 2 * self.trained) + 12 * attended * self.attention

    def sampling_flops(self, *, tokens: float, attended: float) -> float:
        """Forward alone."""
        return 2 * tokens * self.products + 4 * attended * self.attention

    def sampling_bytes(self, *, steps: float, tokens: float, attended: float, itemsize: int) -> float:
        """What so many steps read to draw so many tokens: weights once a step, and the cache of what each
        token attends to. Experts are chosen as evenly as chance would."""
        unread = (1.0 - self.chosen) ** (tokens / steps) if steps else 1.0
        weights = steps * (self.read + self.experts * (1.0 - unread))
        return itemsize * (weights + attended * self.cached)


def model_work(model: Qwen3.Config, *, converted: nn.Module | None = None) -> ModelWork:
    """Of a model as it is sampled from or, as its converters left it, as it is trained; that one may be
    without memory."""
    if converted is None:
        with torch.device("meta"):
            converted = model.build()
    assert isinstance(converted, Qwen3)
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


def _share_of_a_token(parameter: nn.Parameter, module: Qwen3, *, chosen: float) -> float:
    """Of its weights, those that a token is multiplied with."""
    if parameter.ndim == 3:  # the stacked matrices of experts
        return chosen
    is_table = module.lm_head is not None and parameter is module.embed_tokens.weight
    return 0.0 if parameter.ndim < 2 or is_table else 1.0
