from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Qwen3.Config]:
    """A Qwen3 of width 32 with 2 layers; any size can be set."""

    def make(
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        tie: bool = True,
        vocab_size: int = 64,
        theta: float = 1e4,
    ) -> Qwen3.Config:
        return Qwen3.Config(
            vocab_size=vocab_size,
            dim=32,
            num_layers=2,
            tie_embeddings=tie,
            block=TransformerBlock.Config(
                attention=Attention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8),
                feed_forward=FeedForward.Config(hidden_dim=48),
            ),
            rope=RoPE.Config(theta=theta, max_positions=128),
        )

    return make


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., Qwen3.Config]) -> Callable[..., Qwen3]:
    """Weights are large and the norms' uneven, so that a swapped row or norm shows in the logits."""

    def make(*, seed: int = 0, **sizes: Any) -> Qwen3:
        model = make_config(**sizes).build()
        model.init_weights(seed=seed, std=0.2)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return model

    return make
