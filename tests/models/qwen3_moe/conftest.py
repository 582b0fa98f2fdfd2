from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl.models.qwen3.model import Attention, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3_moe.model import MoE


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Qwen3.Config]:
    """A mixture of width 32 with 2 layers of 6 experts; any size can be set."""

    def make(
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        num_experts: int = 6,
        num_experts_per_token: int = 2,
        normalize_weights: bool = True,
        tie: bool = True,
        theta: float = 1e4,
    ) -> Qwen3.Config:
        return Qwen3.Config(
            vocab_size=64,
            dim=32,
            num_layers=2,
            tie_embeddings=tie,
            block=TransformerBlock.Config(
                attention=Attention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8),
                feed_forward=MoE.Config(
                    num_experts=num_experts,
                    num_experts_per_token=num_experts_per_token,
                    hidden_dim=24,
                    normalize_weights=normalize_weights,
                ),
            ),
            rope=RoPE.Config(theta=theta, max_positions=128),
        )

    return make


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., Qwen3.Config]) -> Callable[..., Qwen3]:
    """Weights are large and the norms' uneven, so that a swapped row, norm or expert shows in the logits."""

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
