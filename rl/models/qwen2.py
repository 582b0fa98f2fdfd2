"""Qwen2 and Qwen2.5: a decoder with biases on queries, keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class Qwen2Adapter(DecoderAdapter):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    qkv_bias = True

    @classmethod
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        return {}  # Its config.json has no attention_bias.


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    ffn = FeedForward.Config
    sized = partial(
        Qwen2Adapter.sized,
        vocab_size=151_936, num_kv_heads=2, head_dim=128, max_positions=32_768, theta=1_000_000.0,
    )  # fmt: skip
    flavors = {
        # vLLM's Qwen2 has no other head size than width / heads.
        "tiny": sized(
            dim=128, num_layers=3, num_heads=4, feed_forward=ffn(hidden_dim=384),
            tie_embeddings=True,
            num_kv_heads=2, head_dim=32, vocab_size=320, max_positions=1024, theta=10_000.0,
            init_std=0.06,
        ),
        "0.5B": sized(
            dim=896, num_layers=24, num_heads=14, head_dim=64, feed_forward=ffn(hidden_dim=4864),
            tie_embeddings=True
        ),
        "1.5B": sized(dim=1536, num_layers=28, num_heads=12, feed_forward=ffn(hidden_dim=8960),
            tie_embeddings=True),
        "3B": sized(dim=2048, num_layers=36, num_heads=16, feed_forward=ffn(hidden_dim=11_008),
            tie_embeddings=True),
        "7B": sized(
            dim=3584, num_layers=28, num_heads=28, num_kv_heads=4,
            feed_forward=ffn(hidden_dim=18_944),
            tie_embeddings=False, vocab_size=152_064,
        ),
    }  # fmt: skip
    return spec_of_flavor(flavor, flavors, adapter=Qwen2Adapter)
