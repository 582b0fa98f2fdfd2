"""Llama 2, 3, 3.1, 3.2 and models of their architecture, such as SmolLM2: a decoder without
normalized queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rl.models.adapter import DecoderAdapter, refuse_other_values
from rl.models.decoder import FeedForward
from rl.models.rope import Llama3Scaling
from rl.models.spec import ModelSpec, spec_of_flavor


class LlamaAdapter(DecoderAdapter):
    model_type = "llama"
    architecture = "LlamaForCausalLM"

    @classmethod
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        refuse_other_values(hf, {"pretraining_tp": (None, 1)})
        return super().switches_from_hf(hf)


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    ffn = FeedForward.Config
    sized = partial(LlamaAdapter.sized, norm_eps=1e-5, tie_embeddings=True)
    smollm2 = partial(sized, vocab_size=49_152, head_dim=64, max_positions=8192, theta=100_000.0)
    llama3 = partial(
        sized, vocab_size=128_256, num_kv_heads=8, max_positions=131_072, theta=500_000.0
    )
    scaling = partial(
        Llama3Scaling,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    flavors = {
        "tiny": sized(
            dim=128, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=32,
            feed_forward=ffn(hidden_dim=384),
            vocab_size=320, max_positions=1024, theta=10_000.0, init_std=0.06,
        ),
        "SmolLM2-135M": smollm2(
            dim=576, num_layers=30, num_heads=9, num_kv_heads=3, feed_forward=ffn(hidden_dim=1536)
        ),
        "SmolLM2-360M": smollm2(
            dim=960, num_layers=32, num_heads=15, num_kv_heads=5, feed_forward=ffn(hidden_dim=2560)
        ),
        "SmolLM2-1.7B": smollm2(
            dim=2048, num_layers=24, num_heads=32, num_kv_heads=32,
            feed_forward=ffn(hidden_dim=8192), theta=130_000.0
        ),
        "3.2-1B": llama3(
            dim=2048, num_layers=16, num_heads=32, head_dim=64, feed_forward=ffn(hidden_dim=8192),
            scaling=scaling(factor=32.0),
        ),
        "3.2-3B": llama3(
            dim=3072, num_layers=28, num_heads=24, head_dim=128, feed_forward=ffn(hidden_dim=8192),
            scaling=scaling(factor=32.0),
        ),
        "3.1-8B": llama3(
            dim=4096, num_layers=32, num_heads=32, head_dim=128,
            feed_forward=ffn(hidden_dim=14_336),
            scaling=scaling(factor=8.0), tie_embeddings=False,
        ),
    }  # fmt: skip
    return spec_of_flavor(flavor, flavors, adapter=LlamaAdapter)
