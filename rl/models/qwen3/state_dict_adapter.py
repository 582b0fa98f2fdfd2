"""Qwen3's parameters and configuration, ours and Hugging Face's.

Our fused weights order their rows by key-value head (see model.py), so one of ours is
several of theirs, regrouped; everything else is renamed.

Shape legend: E model width, K key-value heads, G query heads of one key-value head,
D head size, W = F / K feed-forward rows of one key-value head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl.config.configurable import Configurable
from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock

ARCHITECTURE = "Qwen3ForCausalLM"

_TOP = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_QKV = "attention.qkv_proj.weight"
_GATE_UP = "feed_forward.gate_up_proj.weight"
_LAYER = {
    "attention_norm.weight": ["input_layernorm.weight"],
    _QKV: ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attention.q_norm.weight": ["self_attn.q_norm.weight"],
    "attention.k_norm.weight": ["self_attn.k_norm.weight"],
    "attention.o_proj.weight": ["self_attn.o_proj.weight"],
    "ffn_norm.weight": ["post_attention_layernorm.weight"],
    _GATE_UP: ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "feed_forward.down_proj.weight": ["mlp.down_proj.weight"],
}


class Qwen3StateDictAdapter:
    """Implements `rl.models.spec.StateDictAdapter`; works on meta tensors too, for shapes alone."""

    def __init__(self, config: Qwen3.Config) -> None:
        self.config = config
        attention = config.block.attention
        self.num_kv_heads = attention.num_kv_heads
        self.group_size = attention.num_heads // attention.num_kv_heads
        self.head_dim = attention.head_dim

    def hf_names(self, name: str) -> list[str]:
        """Raises KeyError for a name that is no parameter of Qwen3."""
        if name in _TOP:
            return [_TOP[name]]
        _, layer, kind = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        if kind not in _LAYER:
            raise KeyError(f"{name!r} is not a parameter of Qwen3")
        return [f"model.layers.{layer}.{hf_kind}" for hf_kind in _LAYER[kind]]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if name.endswith(_QKV):
            q_KGDE, k_K1DE, v_K1DE = (x.unflatten(0, (self.num_kv_heads, -1, self.head_dim)) for x in tensors)
            return torch.cat((q_KGDE, k_K1DE, v_K1DE), dim=1).flatten(0, 2)
        if name.endswith(_GATE_UP):
            gate_KWE, up_KWE = (x.unflatten(0, (self.num_kv_heads, -1)) for x in tensors)
            return torch.cat((gate_KWE, up_KWE), dim=1).flatten(0, 1)
        (tensor,) = tensors
        return tensor

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        parts = [tensor]
        if name.endswith(_QKV):
            heads = tensor.unflatten(0, (self.num_kv_heads, self.group_size + 2, self.head_dim))
            parts = [x.flatten(0, 2) for x in heads.split((self.group_size, 1, 1), dim=1)]
        elif name.endswith(_GATE_UP):
            parts = [x.flatten(0, 1) for x in tensor.unflatten(0, (self.num_kv_heads, 2, -1)).unbind(1)]
        return dict(zip(self.hf_names(name), parts, strict=True))

    def hf_config(self) -> dict[str, Any]:
        """Token ids and dtype are not the model's and are added by whoever writes the folder."""
        feed_forward = self.config.block.feed_forward
        assert isinstance(feed_forward, FeedForward.Config)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "intermediate_size": feed_forward.hidden_dim,
            **trunk_to_hf(self.config),
        }


def trunk_to_hf(config: Qwen3.Config) -> dict[str, Any]:
    """Of `config.json`, all but the name of the architecture and the feed-forward layers."""
    attention = config.block.attention
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.rope.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": config.init_std,
        "use_cache": True,
        # transformers 5 reads the first; transformers 4 the second, and would silently
        # take another base without it.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "rope_theta": config.rope.theta,
    }


def config_from_hf(hf: dict[str, Any]) -> Qwen3.Config:
    """Our config of a Hugging Face `config.json`.

    Raises:
        ValueError: for another architecture, a missing field, or what this model does not do
            (rope scaling, attention bias, sliding windows, quantized weights).
    """
    check_architecture(hf, model_type="qwen3", architecture=ARCHITECTURE)
    hidden_dim = positive_int(hf, "intermediate_size")
    return trunk_from_hf(hf, feed_forward=FeedForward.Config(hidden_dim=hidden_dim))


def check_architecture(hf: dict[str, Any], *, model_type: str, architecture: str) -> None:
    """Raise ValueError for the `config.json` of another model."""
    for field in ("architectures", "layer_types"):
        if not isinstance(hf.get(field), list | None):
            raise ValueError(f"config.json: {field}={hf[field]!r}: must be a list")
    architectures = hf.get("architectures") or [architecture]
    if hf.get("model_type") != model_type or architecture not in architectures:
        raise ValueError(
            f"config.json: model_type={hf.get('model_type')!r}, architectures={architectures!r}: "
            f"a checkpoint of another architecture; must be {model_type!r} and [{architecture!r}]"
        )


def trunk_from_hf(hf: dict[str, Any], *, feed_forward: Configurable.Config) -> Qwen3.Config:
    """All but the feed-forward layers; raises ValueError as `config_from_hf` does."""
    refuse_other_values(
        hf,
        {
            "attention_bias": (None, False),
            "use_sliding_window": (None, False),
            "hidden_act": (None, "silu"),
            "quantization_config": (None,),
        },
    )
    layer_types = set(hf.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"config.json: layer_types has {sorted(layer_types)}: must be 'full_attention' in every layer"
        )
    return Qwen3.Config(
        vocab_size=positive_int(hf, "vocab_size"),
        dim=positive_int(hf, "hidden_size"),
        num_layers=positive_int(hf, "num_hidden_layers"),
        tie_embeddings=boolean({"tie_word_embeddings": False} | hf, "tie_word_embeddings"),
        norm_eps=_positive_number({"rms_norm_eps": 1e-6} | hf, "rms_norm_eps"),
        init_std=_positive_number({"initializer_range": 0.02} | hf, "initializer_range"),
        block=TransformerBlock.Config(
            attention=Attention.Config(
                num_heads=positive_int(hf, "num_attention_heads"),
                num_kv_heads=positive_int(hf, "num_key_value_heads"),
                head_dim=positive_int({"head_dim": 128} | hf, "head_dim"),
            ),
            feed_forward=feed_forward,
        ),
        rope=RoPE.Config(theta=_rope_theta(hf), max_positions=positive_int(hf, "max_position_embeddings")),
    )


def refuse_other_values(hf: dict[str, Any], valid: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a field that has none of its `valid` values, of which the last is named."""
    for field, values in valid.items():
        if hf.get(field) not in values:
            raise ValueError(f"config.json: {field}={hf[field]!r} is not supported: must be {values[-1]!r}")


def _rope_theta(hf: dict[str, Any]) -> float:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(field) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: {field}={rope!r}: must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = set(rope) - {"rope_type", "type", "rope_theta"}
    if kind != "default" or unknown:
        raise ValueError(
            f"config.json: {field}={rope!r} is not supported: must be of rope_type 'default', unscaled"
        )
    return _positive_number({"rope_theta": hf.get("rope_theta")} | rope, "rope_theta")


def _positive_number(hf: dict[str, Any], field: str) -> float:
    value = hf.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {field}={value!r}: must be a positive number")
    return float(value)


def boolean(hf: dict[str, Any], field: str) -> bool:
    """A field that must be there; raises ValueError for anything but true and false."""
    value = hf.get(field)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {field}={value!r}: must be true or false")
    return value


def positive_int(hf: dict[str, Any], field: str) -> int:
    """A field that must be there; raises ValueError for anything but a positive integer."""
    value = hf.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {field}={value!r}: must be a positive integer")
    return value
