"""The sizes of Qwen3, by name."""

from __future__ import annotations

from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3.parallelize import check_qwen3_layout, parallelize_qwen3
from rl.models.qwen3.parallelize_generator import parallelize_qwen3_generator
from rl.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter, config_from_hf
from rl.models.spec import ModelSpec


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
) -> Qwen3.Config:
    return Qwen3.Config(
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


def _flavors() -> dict[str, Qwen3.Config]:
    return {
        # vLLM's CPU attention has no heads below 32.
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


def model_registry(flavor: str) -> ModelSpec:
    """A fresh spec of one size, free to edit. Raises ValueError for a flavor that does not exist."""
    flavors = _flavors()
    if flavor not in flavors:
        raise ValueError(f"qwen3 flavor {flavor!r} does not exist: must be one of {', '.join(flavors)}")
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=flavors[flavor],
        parallelize=parallelize_qwen3,
        check_layout=check_qwen3_layout,
        parallelize_generator=parallelize_qwen3_generator,
        adapter=Qwen3StateDictAdapter,
        from_hf_config=config_from_hf,
    )
