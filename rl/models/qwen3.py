"""Qwen3, dense: a decoder with normalized queries and keys."""

from __future__ import annotations

from functools import partial

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class Qwen3Adapter(DecoderAdapter):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    default_head_dim = 128


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    ffn = FeedForward.Config
    sized = partial(
        Qwen3Adapter.sized,
        vocab_size=151_936, num_kv_heads=8, head_dim=128, max_positions=40_960, theta=1_000_000.0,
    )  # fmt: skip
    flavors = {
        # vLLM's CPU attention has no head size below 32.
        "tiny": sized(
            dim=128, num_layers=3, num_heads=8, feed_forward=ffn(hidden_dim=384),
            tie_embeddings=True,
            num_kv_heads=4, head_dim=32, vocab_size=320, max_positions=1024, theta=10_000.0,
            init_std=0.06,
        ),
        "0.6B": sized(dim=1024, num_layers=28, num_heads=16, feed_forward=ffn(hidden_dim=3072),
            tie_embeddings=True),
        "1.7B": sized(dim=2048, num_layers=28, num_heads=16, feed_forward=ffn(hidden_dim=6144),
            tie_embeddings=True),
        "4B": sized(dim=2560, num_layers=36, num_heads=32, feed_forward=ffn(hidden_dim=9728),
            tie_embeddings=True),
        "8B": sized(dim=4096, num_layers=36, num_heads=32, feed_forward=ffn(hidden_dim=12_288),
            tie_embeddings=False),
        "14B": sized(dim=5120, num_layers=40, num_heads=40, feed_forward=ffn(hidden_dim=17_408),
            tie_embeddings=False),
        "32B": sized(dim=5120, num_layers=64, num_heads=64, feed_forward=ffn(hidden_dim=25_600),
            tie_embeddings=False),
    }  # fmt: skip
    return spec_of_flavor(flavor, flavors, adapter=Qwen3Adapter)
