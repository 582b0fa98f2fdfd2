from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl.config.configurable import Configurable
from rl.models.decoder import Decoder, FeedForward
from rl.models.moe import MoE
from rl.models.qwen3 import Qwen3Adapter


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Decoder.Config]:
    """Maker of configs of width 32 with 2 layers, dense or with experts."""

    def make(
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        qk_norm: bool = True,
        qkv_bias: bool = False,
        num_experts: int = 0,
        normalize_weights: bool = True,
        tie: bool = True,
        vocab_size: int = 64,
    ) -> Decoder.Config:
        feed_forward: Configurable.Config = FeedForward.Config(hidden_dim=48)
        if num_experts:
            feed_forward = MoE.Config(
                num_experts=num_experts,
                num_experts_per_token=2,
                hidden_dim=24,
                normalize_weights=normalize_weights,
            )
        config = Qwen3Adapter.sized(
            vocab_size=vocab_size, dim=32, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8,
            feed_forward=feed_forward, tie_embeddings=tie, theta=1e4, max_positions=128,
        )  # fmt: skip
        config.block.attention = replace(config.block.attention, qk_norm=qk_norm, qkv_bias=qkv_bias)
        return config

    return make


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., Decoder.Config]) -> Callable[..., Decoder]:
    """Maker of models with large weights and uneven norms and biases, so that swapped rows change the logits."""

    def make(*, seed: int = 0, **sizes: Any) -> Decoder:
        model: Decoder = make_config(**sizes).build()
        model.init_weights(seed=seed, std=0.2)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        return model

    return make
