"""Qwen3, dense: a decoder with normalized queries and keys."""

from __future__ import annotations

from typing import Any

from rl.models.adapter import DecoderAdapter, decoder_from_hf
from rl.models.decoder import Attention, Decoder, FeedForward, RoPE, TransformerBlock
from rl.models.spec import ModelSpec, choose_flavor


class Qwen3Adapter(DecoderAdapter):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"


def config_from_hf(hf: dict[str, Any]) -> Decoder.Config:
    """Return the model config of a `config.json`; raise ValueError if it is not of a supported Qwen3."""
    return decoder_from_hf(hf, adapter=Qwen3Adapter, head_dim=128)


def _config(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    hidden_dim: int,
    tie_embeddings: bool,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 151_936,
    max_positions: int = 40_960,
    theta: float = 1_000_000.0,
    init_std: float = 0.02,
) -> Decoder.Config:
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        tie_embeddings=tie_embeddings,
        init_std=init_std,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim),
            feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        ),
        rope=RoPE.Config(theta=theta, max_positions=max_positions),
    )


def _flavors() -> dict[str, Decoder.Config]:
    return {
        # vLLM's CPU attention has no head size below 32.
        "tiny": _config(
            dim=128, num_layers=3, num_heads=8, hidden_dim=384, tie_embeddings=True,
            num_kv_heads=4, head_dim=32, vocab_size=320, max_positions=1024, theta=10_000.0, init_std=0.06,
        ),
        "0.6B": _config(dim=1024, num_layers=28, num_heads=16, hidden_dim=3072, tie_embeddings=True),
        "1.7B": _config(dim=2048, num_layers=28, num_heads=16, hidden_dim=6144, tie_embeddings=True),
        "4B": _config(dim=2560, num_layers=36, num_heads=32, hidden_dim=9728, tie_embeddings=True),
        "8B": _config(dim=4096, num_layers=36, num_heads=32, hidden_dim=12_288, tie_embeddings=False),
        "14B": _config(dim=5120, num_layers=40, num_heads=40, hidden_dim=17_408, tie_embeddings=False),
        "32B": _config(dim=5120, num_layers=64, num_heads=64, hidden_dim=25_600, tie_embeddings=False),
    }  # fmt: skip


def make_spec(*, flavor: str, model: Decoder.Config) -> ModelSpec:
    return ModelSpec(
        name=Qwen3Adapter.model_type,
        flavor=flavor,
        model=model,
        adapter=Qwen3Adapter,
        from_hf_config=config_from_hf,
    )


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    return make_spec(flavor=flavor, model=choose_flavor(_flavors(), flavor, family=Qwen3Adapter.model_type))
