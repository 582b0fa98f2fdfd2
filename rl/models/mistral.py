"""Mistral, dense: Llama's decoder, in some versions with a sliding window in every layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class MistralAdapter(DecoderAdapter):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    always_windowed = True

    def hf_config(self) -> dict[str, Any]:
        fields = super().hf_config()
        if not self.config.global_layers:
            # transformers opens a folder with `layer_types` as Ministral.
            fields.pop("layer_types", None)
        return fields


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    ffn = FeedForward.Config
    sized = partial(MistralAdapter.sized, tie_embeddings=False, norm_eps=1e-5, max_positions=32_768)
    flavors = {
        "tiny": sized(
            dim=128, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=32,
            feed_forward=ffn(hidden_dim=384),
            vocab_size=320, max_positions=1024, theta=10_000.0, init_std=0.06, window=32,
        ),
        "7B-v0.1": sized(
            dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
            feed_forward=ffn(hidden_dim=14_336),
            vocab_size=32_000, theta=10_000.0, window=4096,
        ),
        "7B-v0.3": sized(
            dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
            feed_forward=ffn(hidden_dim=14_336),
            vocab_size=32_768, theta=1_000_000.0,
        ),
    }  # fmt: skip
    return spec_of_flavor(flavor, flavors, adapter=MistralAdapter)
