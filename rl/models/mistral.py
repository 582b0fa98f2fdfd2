"""Mistral, dense: Llama's decoder, in some versions with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder, FeedForward
from rl.models.spec import ModelSpec, spec_of_flavor


class MistralAdapter(DecoderAdapter):
    """Llama's names and tensors; a `sliding_window` counts without `use_sliding_window`."""

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
    flavors = {
        "tiny": MistralAdapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            feed_forward=FeedForward.Config(hidden_dim=384),
            max_positions=1024,
            theta=10_000.0,
            tie_embeddings=False,
            norm_eps=1e-5,
            init_std=0.06,
            window=32,
        ),
        "7B-v0.1": _size_7b(vocab_size=32_000, theta=10_000.0, window=4096),
        # Later versions see the whole context.
        "7B-v0.3": _size_7b(vocab_size=32_768, theta=1_000_000.0),
    }
    return spec_of_flavor(flavor, flavors, adapter=MistralAdapter)


def _size_7b(*, vocab_size: int, theta: float, window: int | None = None) -> Decoder.Config:
    """Return the config of a version of Mistral 7B."""
    return MistralAdapter.sized(
        vocab_size=vocab_size,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        feed_forward=FeedForward.Config(hidden_dim=14_336),
        max_positions=32_768,
        theta=theta,
        tie_embeddings=False,
        norm_eps=1e-5,
        window=window,
    )
