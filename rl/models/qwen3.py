"""Qwen3, dense: a decoder with normalized queries and keys."""

from __future__ import annotations

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder, FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class Qwen3Adapter(DecoderAdapter):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    default_head_dim = 128


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor.

    Example:
        >>> model_registry("0.6B").model.num_layers
        28
    """
    flavors = {
        "tiny": Qwen3Adapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,  # vLLM's CPU attention has no head size below 32.
            feed_forward=FeedForward.Config(hidden_dim=384),
            max_positions=1024,
            theta=10_000.0,
            tie_embeddings=True,
            init_std=0.06,
        ),
        "0.6B": _size(dim=1024, num_layers=28, num_heads=16, hidden_dim=3072),
        "1.7B": _size(dim=2048, num_layers=28, num_heads=16, hidden_dim=6144),
        "4B": _size(dim=2560, num_layers=36, num_heads=32, hidden_dim=9728),
        "8B": _size(dim=4096, num_layers=36, num_heads=32, hidden_dim=12_288, tied=False),
        "14B": _size(dim=5120, num_layers=40, num_heads=40, hidden_dim=17_408, tied=False),
        "32B": _size(dim=5120, num_layers=64, num_heads=64, hidden_dim=25_600, tied=False),
    }
    return spec_of_flavor(flavor, flavors, adapter=Qwen3Adapter)


def _size(
    *, dim: int, num_layers: int, num_heads: int, hidden_dim: int, tied: bool = True
) -> Decoder.Config:
    """Return the config of a published size; these share vocabulary, heads and positions."""
    return Qwen3Adapter.sized(
        vocab_size=151_936,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        max_positions=40_960,
        theta=1_000_000.0,
        tie_embeddings=tied,
    )
