"""The sizes of Qwen3 MoE, by name."""

from __future__ import annotations

from rl.models.qwen3.model import Attention, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3_moe.model import MoE
from rl.models.qwen3_moe.parallelize import check_qwen3_moe_layout, parallelize_qwen3_moe
from rl.models.qwen3_moe.parallelize_generator import parallelize_qwen3_moe_generator
from rl.models.qwen3_moe.state_dict_adapter import Qwen3MoeStateDictAdapter, config_from_hf
from rl.models.spec import ModelSpec


def _flavors() -> dict[str, Qwen3.Config]:
    return {
        # The dense tiny model with as many feed-forward weights at work for each token.
        "tiny": Qwen3.Config(
            vocab_size=320,
            dim=128,
            num_layers=3,
            tie_embeddings=True,
            init_std=0.06,
            block=TransformerBlock.Config(
                attention=Attention.Config(num_heads=8, num_kv_heads=4, head_dim=32),
                feed_forward=MoE.Config(num_experts=8, num_experts_per_token=2, hidden_dim=192),
            ),
            rope=RoPE.Config(theta=10_000.0, max_positions=1024),
        ),
        "30B-A3B": Qwen3.Config(
            vocab_size=151_936,
            dim=2048,
            num_layers=48,
            tie_embeddings=False,
            block=TransformerBlock.Config(
                attention=Attention.Config(num_heads=32, num_kv_heads=4, head_dim=128),
                feed_forward=MoE.Config(num_experts=128, num_experts_per_token=8, hidden_dim=768),
            ),
            rope=RoPE.Config(theta=1_000_000.0, max_positions=40_960),
        ),
    }


def model_registry(flavor: str) -> ModelSpec:
    """A fresh spec of one size, free to edit. Raises ValueError for a flavor that does not exist."""
    flavors = _flavors()
    if flavor not in flavors:
        raise ValueError(f"qwen3_moe flavor {flavor!r} does not exist: must be one of {', '.join(flavors)}")
    return ModelSpec(
        name="qwen3_moe",
        flavor=flavor,
        model=flavors[flavor],
        parallelize=parallelize_qwen3_moe,
        check_layout=check_qwen3_moe_layout,
        parallelize_generator=parallelize_qwen3_moe_generator,
        adapter=Qwen3MoeStateDictAdapter,
        from_hf_config=config_from_hf,
    )
