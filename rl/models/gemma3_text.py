"""Gemma 3, text: norms around both halves of a block, GeGLU, and mostly layers with a sliding
window.

Layers with a window have a rope base of their own, and no scaling.
"""

from __future__ import annotations

from typing import Any

from rl.models.adapter import (
    GLOBAL,
    LAYER,
    LOCAL,
    DecoderAdapter,
    describe_rope,
    read_field,
    read_rope,
)
from rl.models.decoder import Decoder, FeedForward
from rl.models.layers.rope import RoPE
from rl.models.spec import ModelSpec, spec_of_flavor

_DEFAULTS = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""Values of fields that a `config.json` may leave out."""


class Gemma3TextAdapter(DecoderAdapter):
    """Names, tensors and config.json of Gemma 3's text models."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    qk_norm = True
    default_head_dim = 256
    always_windowed = True
    layer_names = LAYER | {
        "attention_post_norm": ["post_attention_layernorm"],
        "ffn_norm": ["pre_feedforward_layernorm"],
        "ffn_post_norm": ["post_feedforward_layernorm"],
    }
    fixed_fields = {  # noqa: RUF012
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }

    @classmethod
    def sized(cls, **sizes: Any) -> Decoder.Config:
        config = super().sized(norm_offset=True, scale_embeddings=True, **sizes)
        config.block.post_norms = True
        feed_forward = config.block.feed_forward
        assert isinstance(feed_forward, FeedForward.Config)
        feed_forward.activation = "geglu"
        config.local_rope = RoPE.Config(theta=10_000.0, max_positions=config.rope.max_positions)
        return config

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> Decoder.Config:
        hf = _DEFAULTS | hf
        # transformers 5 nests the parameters by kind of layer; transformers 4 has a field of its
        # own for the base of the layers with a window.
        ropes: Any = hf.get("rope_parameters")
        is_nested = isinstance(ropes, dict) and (GLOBAL in ropes or LOCAL in ropes)
        hf["rope_parameters"] = ropes.get(GLOBAL) if is_nested else ropes
        local = {
            "rope_scaling": None,
            "rope_theta": hf["rope_local_base_freq"],
            "rope_parameters": ropes.get(LOCAL) if is_nested else None,
        }

        config = super().config_from_hf(hf)
        config.local_rope = read_rope(hf | local)
        attention = config.block.attention
        scale_dim = read_field(hf, "query_pre_attn_scalar", int)
        attention.scale_dim = None if scale_dim == attention.head_dim else scale_dim
        return config

    @classmethod
    def is_global(cls, hf: dict[str, Any], layer: int) -> bool:
        return (layer + 1) % read_field(hf, "sliding_window_pattern", int) == 0

    def hf_config(self) -> dict[str, Any]:
        config, attention = self.config, self.config.block.attention
        assert config.local_rope is not None
        return {
            **super().hf_config(),
            "query_pre_attn_scalar": attention.scale_dim or attention.head_dim,
            "rope_parameters": {
                GLOBAL: describe_rope(config.rope),
                LOCAL: describe_rope(config.local_rope),
            },
            "rope_local_base_freq": config.local_rope.theta,
        }


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    flavors = {
        "tiny": Gemma3TextAdapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            feed_forward=FeedForward.Config(hidden_dim=384),
            max_positions=1024,
            theta=1_000_000.0,
            init_std=0.06,
            window=32,
            global_layers=(2,),
        ),
        "270M": _size(dim=640, num_layers=18, hidden_dim=2048),
        "1B": _size(dim=1152, num_layers=26, hidden_dim=6912),
    }
    return spec_of_flavor(flavor, flavors, adapter=Gemma3TextAdapter)


def _size(*, dim: int, num_layers: int, hidden_dim: int) -> Decoder.Config:
    """Return the config of a published size, in which every sixth layer sees the whole context."""
    return Gemma3TextAdapter.sized(
        vocab_size=262_144,
        dim=dim,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        feed_forward=FeedForward.Config(hidden_dim=hidden_dim),
        max_positions=32_768,
        theta=1_000_000.0,
        window=512,
        global_layers=tuple(range(5, num_layers, 6)),
    )
