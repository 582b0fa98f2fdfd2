"""Arithmetic of a decoder, counted from its shapes.

A token's product with a matrix of n weights is 2 n operations in the forward, and as many again for
the gradient of its input and for the gradient of trained weights. Attention to one token is 4
operations per number of a head in each layer, its product with the key and the sum of the values,
and twice that in the backward. Norms, rotations, activations and sampling are left out, and
recomputation (activation checkpointing) is not counted: Chowdhery et al., "PaLM"
(arXiv:2204.02311), appendix B, with attention limited by the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """Sizes of the whole model, in numbers rather than bytes, independent of its layout."""

    parameters: int
    """All parameters."""
    products: float
    """Weights that one token is multiplied with: those of its experts only, the whole output head,
    and no embedding unless it is also the output head."""
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

    def count_training_flops(self, *, tokens: float, attended: float) -> float:
        """Return the operations of forward and backward; `attended` is summed over the tokens."""
        return tokens * (4 * self.products + 2 * self.trained) + 12 * attended * self.attention

    def count_sampling_flops(self, *, tokens: float, attended: float) -> float:
        """Return the operations of the forward alone."""
        return 2 * tokens * self.products + 4 * attended * self.attention

    def count_sampling_bytes(
        self, *, steps: float, tokens: float, attended: float, itemsize: int
    ) -> float:
        """Return the bytes read to sample the tokens: weights once a step, and each token's cache.

        Experts are assumed to be chosen uniformly at random.
        """
        # An expert is read in a step unless no token of the step chose it.
        unread = (1.0 - self.chosen) ** (tokens / steps) if steps else 1.0
        weights = steps * (self.read + self.experts * (1.0 - unread))
        return itemsize * (weights + attended * self.cached)


_counted: dict[str, ModelWork] = {}
"""Work of plain models by the text of their configs."""


def count_work(model: Decoder.Config, *, converted: nn.Module | None = None) -> ModelWork:
    """Count the work of the model as it is sampled, or as it is trained.

    Args:
        converted: the trained module, after its converters; may be on the meta device. None counts
            the plain model.

    Example:
        >>> work = count_work(model_spec("qwen3", "0.6B").model)
        >>> work.parameters
        596049920
    """
    if converted is None:
        # A start asks several times, and building a large model takes 0.2 s, even without memory.
        key = repr(model)
        if key not in _counted:
            with torch.device("meta"):
                _counted[key] = count_work(model, converted=model.build())
        return _counted[key]
    assert isinstance(converted, Decoder)
    module = converted
    # Sizes come from the config, numbers of weights from the module, which converters change.
    attention = model.block.attention
    feed_forward: Any = model.block.feed_forward
    chosen = feed_forward.num_experts_per_token / model.num_experts if model.has_experts else 0.0
    parameters = experts = 0
    products = trained = 0.0
    # `parameters` yields a tied embedding once.
    for parameter in module.parameters():
        num_weights = parameter.numel()
        parameters += num_weights
        if parameter.ndim == 3:
            experts += num_weights
        share = _share_of_a_token(parameter, module, chosen=chosen)
        products += num_weights * share
        if parameter.requires_grad:
            trained += num_weights * share

    # A step reads one row of an embedding for each token, which does not count.
    table = 0 if module.lm_head is None else module.embed_tokens.weight.numel()
    return ModelWork(
        parameters=parameters,
        products=products,
        trained=trained,
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
