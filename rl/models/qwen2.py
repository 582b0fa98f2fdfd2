"""Qwen2 and Qwen2.5: a decoder with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder, FeedForward
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
    flavors = {
        "tiny": Qwen2Adapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,  # vLLM's Qwen2 has no other head size than width / heads.
            feed_forward=FeedForward.Config(hidden_dim=384),
            max_positions=1024,
            theta=10_000.0,
            tie_embeddings=True,
            init_std=0.06,
        ),
        "0.5B": _size(dim=896, num_layers=24, num_heads=14, head_dim=64, hidden_dim=4864),
        "1.5B": _size(dim=1536, num_layers=28, num_heads=12, hidden_dim=8960),
        "3B": _size(dim=2048, num_layers=36, num_heads=16, hidden_dim=11_008),
        # The larger sizes do not tie their embeddings, and pad the vocabulary further.
        "7B": Qwen2Adapter.sized(
            vocab_size=152_064,
            dim=3584,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            feed_forward=FeedForward.Config(hidden_dim=18_944),
            max_positions=32_768,
            theta=1_000_000.0,
            tie_embeddings=False,
        ),
    }
    return spec_of_flavor(flavor, flavors, adapter=Qwen2Adapter)


def _size(
    *, dim: int, num_layers: int, num_heads: int, hidden_dim: int, head_dim: int = 128
) -> Decoder.Config:
    """Return the config of a published size with tied embeddings."""
    return Qwen2Adapter.sized(
        vocab_size=151_936,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=head_dim,
        feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        max_positions=32_768,
        theta=1_000_000.0,
        tie_embeddings=True,
    )
