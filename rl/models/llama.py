"""Llama 2 to 3.2 and models of their architecture, such as SmolLM2.

The plainest family: a decoder without normalized queries, biases or windows.
"""

from __future__ import annotations

from typing import Any

from rl.models.adapter import DecoderAdapter, refuse_other_values
from rl.models.decoder import Decoder, FeedForward
from rl.models.layers.rope import Llama3Scaling
from rl.models.spec import ModelSpec, spec_of_flavor


class LlamaAdapter(DecoderAdapter):
    """Names, tensors and config.json of Llama, which are the defaults of the adapter."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    @classmethod
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        # Above 1, transformers splits the products and adds the parts in another order.
        refuse_other_values(hf, {"pretraining_tp": (None, 1)})
        return super().switches_from_hf(hf)


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    flavors = {
        "tiny": LlamaAdapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            feed_forward=FeedForward.Config(hidden_dim=384),
            max_positions=1024,
            theta=10_000.0,
            tie_embeddings=True,
            norm_eps=1e-5,
            init_std=0.06,
        ),
        "SmolLM2-135M": _size_smollm2(
            dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536
        ),
        "SmolLM2-360M": _size_smollm2(
            dim=960, num_layers=32, num_heads=15, num_kv_heads=5, hidden_dim=2560
        ),
        "SmolLM2-1.7B": _size_smollm2(
            dim=2048, num_layers=24, num_heads=32, num_kv_heads=32, hidden_dim=8192, theta=130_000.0
        ),
        "3.2-1B": _size_llama3(
            dim=2048, num_layers=16, num_heads=32, head_dim=64, hidden_dim=8192, factor=32.0
        ),
        "3.2-3B": _size_llama3(
            dim=3072, num_layers=28, num_heads=24, head_dim=128, hidden_dim=8192, factor=32.0
        ),
        "3.1-8B": _size_llama3(
            dim=4096,
            num_layers=32,
            num_heads=32,
            head_dim=128,
            hidden_dim=14_336,
            factor=8.0,
            tie_embeddings=False,
        ),
    }
    return spec_of_flavor(flavor, flavors, adapter=LlamaAdapter)


def _size_smollm2(*, hidden_dim: int, theta: float = 100_000.0, **sizes: Any) -> Decoder.Config:
    """Return the config of a SmolLM2; `sizes` are other arguments of `LlamaAdapter.sized`."""
    return LlamaAdapter.sized(
        vocab_size=49_152,
        head_dim=64,
        feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        max_positions=8192,
        theta=theta,
        tie_embeddings=True,
        norm_eps=1e-5,
        **sizes,
    )


def _size_llama3(
    *, hidden_dim: int, factor: float, tie_embeddings: bool = True, **sizes: Any
) -> Decoder.Config:
    """Return the config of a Llama 3.1 or 3.2, whose longest wavelengths grow by `factor`."""
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return LlamaAdapter.sized(
        vocab_size=128_256,
        num_kv_heads=8,
        feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        max_positions=131_072,
        theta=500_000.0,
        scaling=scaling,
        tie_embeddings=tie_embeddings,
        norm_eps=1e-5,
        **sizes,
    )
