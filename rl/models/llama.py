"""Llama 2, 3, 3.1, 3.2 and models of their architecture, such as SmolLM2: a decoder without normalized queries."""

from __future__ import annotations

from functools import partial

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class LlamaAdapter(DecoderAdapter):
    model_type = "llama"
    architecture = "LlamaForCausalLM"


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    ffn = FeedForward.Config
    smollm2 = partial(
        LlamaAdapter.sized,
        vocab_size=49_152,
        tie_embeddings=True,
        max_positions=8192,
        theta=100_000.0,
        norm_eps=1e-5,
    )
    flavors = {
        "SmolLM2-135M": smollm2(
            dim=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, feed_forward=ffn(hidden_dim=1536)
        ),
        "SmolLM2-360M": smollm2(
            dim=960, num_layers=32, num_heads=15, num_kv_heads=5, head_dim=64, feed_forward=ffn(hidden_dim=2560)
        ),
    }  # fmt: skip
    return spec_of_flavor(flavor, flavors, adapter=LlamaAdapter)
