"""Hugging Face names, tensors and config.json of decoders whose checkpoints follow Llama's naming.

Our fused weights order their rows by key-value head, or group of feed-forward rows
(`rl.models.decoder`), so each consists of several Hugging Face weights, regrouped; all other
parameters are renamed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rl.config.configurable import Configurable
from rl.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from rl.models.layers.rope import SCALINGS, RoPE, RoPEScaling

F = TypeVar("F", bool, int, float)

_TOP = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_QKV, _GATE_UP = "attention.qkv_proj", "feed_forward.gate_up_proj"
_MAY_HAVE_BIAS = (_QKV, _GATE_UP, "attention.o_proj", "feed_forward.down_proj")
LAYER = {
    "attention_norm": ["input_layernorm"],
    _QKV: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.o_proj": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    _GATE_UP: ["mlp.gate_proj", "mlp.up_proj"],
    "feed_forward.down_proj": ["mlp.down_proj"],
}
"""Hugging Face names of the modules of a layer, with those that only some families have."""
_MAX_SIZE = 1 << 19
"""Largest integer in a `config.json`, such as a width; below it no product of sizes overflows."""
_MAX_SIZES = {
    "num_hidden_layers": 1000,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
    "original_max_position_embeddings": 1 << 24,
    "sliding_window": 1 << 24,
}
GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of `layer_types`."""


class DecoderAdapter:
    """Translation between our parameters and Hugging Face's tensors and `config.json`.

    A family is a subclass that names what differs. A large model is read and written as a stream of
    whole, unsharded CPU tensors. Meta tensors work too, for shapes.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """Class of transformers that opens the family's folders."""
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    default_head_dim: ClassVar[int | None] = None
    """Head size where `config.json` has none; None for the width over the number of heads."""
    layer_names: ClassVar[dict[str, list[str]]] = LAYER
    fixed_fields: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    """Fields of `config.json` that have one supported value, and that value where they are missing.
    """
    always_windowed: ClassVar[bool] = False
    """True if `sliding_window` alone is enough; False if it needs `use_sliding_window`."""

    def __init__(self, config: Decoder.Config) -> None:
        self.config = config
        attention = config.block.attention
        self.num_kv_heads = attention.num_kv_heads
        self.group_size = attention.num_heads // attention.num_kv_heads
        feed_forward: Any = config.block.feed_forward
        self.num_groups = math.gcd(feed_forward.hidden_dim, attention.num_kv_heads)

    @classmethod
    def sized(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        feed_forward: Configurable.Config,
        max_positions: int,
        theta: float,
        scaling: RoPEScaling | None = None,
        attention_bias: bool = False,
        **sizes: Any,
    ) -> Decoder.Config:
        """Return the config of a model of the family.

        Args:
            attention_bias: add biases to all four projections of the attention.
            sizes: other fields of `Decoder.Config`.
        """
        attention = Attention.Config(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qk_norm=cls.qk_norm,
            qkv_bias=cls.qkv_bias or attention_bias,
            o_bias=attention_bias,
        )
        return Decoder.Config(
            block=TransformerBlock.Config(attention=attention, feed_forward=feed_forward),
            rope=RoPE.Config(theta=theta, max_positions=max_positions, scaling=scaling),
            **sizes,
        )

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> Decoder.Config:
        """Return the model config that a `config.json` describes.

        Raises:
            ValueError: if a field is missing or malformed, or asks for something the decoder does
                not implement (quantized weights).
        """
        cls._check_kind(hf)
        # A field that the decoder ignores would silently give another function.
        refuse_other_values(hf, {"quantization_config": (None,)})
        for field, value in cls.fixed_fields.items():
            refuse_other_values(hf, {field: (None, value)})

        num_layers = read_field(hf, "num_hidden_layers", int)
        window, global_layers = cls.read_windows(hf, num_layers)
        rope = read_rope(hf)
        dim = read_field(hf, "hidden_size", int)
        num_heads = read_field(hf, "num_attention_heads", int)
        return cls.sized(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=read_field(hf, "num_key_value_heads", int, num_heads),
            head_dim=read_field(hf, "head_dim", int, cls.default_head_dim or dim // num_heads),
            feed_forward=cls.feed_forward_from_hf(hf),
            vocab_size=read_field(hf, "vocab_size", int),
            max_positions=rope.max_positions,
            theta=rope.theta,
            scaling=rope.scaling,
            tie_embeddings=read_field(hf, "tie_word_embeddings", bool, False),
            norm_eps=read_field(hf, "rms_norm_eps", float, 1e-6),
            init_std=read_field(hf, "initializer_range", float, 0.02),
            window=window,
            global_layers=global_layers,
            **cls.switches_from_hf(hf),
        )

    @classmethod
    def _check_kind(cls, hf: dict[str, Any]) -> None:
        """Raise ValueError for the config of another family."""
        architectures = hf.get("architectures") or [cls.architecture]
        is_ours = isinstance(architectures, list) and cls.architecture in architectures
        if hf.get("model_type") != cls.model_type or not is_ours:
            raise ValueError(
                f"config.json: model_type={hf.get('model_type')!r}, "
                f"architectures={architectures!r}: a checkpoint of another architecture; must be "
                f"{cls.model_type!r} and [{cls.architecture!r}]"
            )

    @classmethod
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `sized` that are not sizes.

        Raises ValueError for unsupported values.
        """
        return {"attention_bias": read_field(hf, "attention_bias", bool, False)}

    @classmethod
    def read_windows(
        cls, hf: dict[str, Any], num_layers: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the sliding window, or None, and the layers without one."""
        window = None
        if cls.always_windowed or read_field(hf, "use_sliding_window", bool, False):
            # transformers' default; null is not the default, but no window.
            window_field = hf.get("sliding_window", 4096)
            if window_field is not None:
                window = read_field({"sliding_window": window_field}, "sliding_window", int)

        kinds = hf.get("layer_types")
        if kinds is None:
            kinds = []
            for layer in range(num_layers):
                is_global = window is None or cls.is_global(hf, layer)
                kinds.append(GLOBAL if is_global else LOCAL)

        valid = [GLOBAL] if window is None else [GLOBAL, LOCAL]
        is_complete = isinstance(kinds, list) and len(kinds) == num_layers
        if not is_complete or any(kind not in valid for kind in kinds):
            raise ValueError(
                f"config.json: layer_types={kinds!r}: must be a list of {num_layers} of "
                f"{' and '.join(valid)}, with sliding_window={hf.get('sliding_window')!r} and "
                f"use_sliding_window={hf.get('use_sliding_window')!r}"
            )

        # Without a layer that has a window, the config is that of a model without windows.
        if LOCAL not in kinds:
            return None, ()
        return window, tuple(layer for layer, kind in enumerate(kinds) if kind == GLOBAL)

    @classmethod
    def is_global(cls, hf: dict[str, Any], layer: int) -> bool:
        """Return True if a layer has no window in a `config.json` without `layer_types`."""
        if cls.always_windowed or hf.get("max_window_layers") == 0:
            return False
        return layer < read_field(hf, "max_window_layers", int, 28)

    @classmethod
    def feed_forward_from_hf(cls, hf: dict[str, Any]) -> Configurable.Config:
        """Return the config of the feed-forward layers."""
        return FeedForward.Config(
            hidden_dim=read_field(hf, "intermediate_size", int),
            bias=read_field(hf, "mlp_bias", bool, False),
        )

    def hf_names(self, name: str) -> list[str]:
        """Return the Hugging Face names of a parameter's tensors, in order.

        Raises KeyError for an unknown parameter.

        Example:
            >>> adapter.hf_names("layers.3.feed_forward.gate_up_proj.weight")
            ['model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight']
        """
        if name in _TOP:
            return [_TOP[name]]
        layer, module, leaf = split_name(name)
        leaves = ("weight", "bias") if module in _MAY_HAVE_BIAS else ("weight",)
        if module not in self.layer_names or leaf not in leaves:
            raise KeyError(
                f"{name!r} is not a parameter of {type(self).__name__.removesuffix('Adapter')}"
            )
        return [
            f"model.layers.{layer}.{hf_module}.{leaf}" for hf_module in self.layer_names[module]
        ]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return the parameter made of the tensors of `hf_names(name)`."""
        if len(tensors) == 1:
            return tensors[0]
        return self.join_groups(tensors, num_groups=self._count_groups(name))

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of the parameter, by their names."""
        _, module, _ = split_name(name)
        parts = [tensor]
        if module == _QKV:
            # A group has the query heads that share a key-value head, its key and its value head.
            shares = (self.group_size, 1, 1)
            parts = self.split_groups(tensor, shares, num_groups=self.num_kv_heads)
        elif module == _GATE_UP:
            parts = self.split_groups(tensor, (1, 1), num_groups=self.num_groups)
        return dict(zip(self.hf_names(name), parts, strict=True))

    def _count_groups(self, name: str) -> int:
        return self.num_kv_heads if _QKV in name else self.num_groups

    def join_groups(self, tensors: Sequence[Tensor], *, num_groups: int) -> Tensor:
        """Return the rows of all tensors, ordered by group."""
        groups = [tensor.unflatten(0, (num_groups, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def split_groups(
        self, tensor: Tensor, shares: Sequence[int], *, num_groups: int
    ) -> list[Tensor]:
        """Return the tensors that `join_groups` joined, given their shares of a group's rows."""
        groups = tensor.unflatten(0, (num_groups, sum(shares), -1))
        return [part.flatten(0, 2) for part in groups.split(list(shares), dim=1)]

    def hf_config(self) -> dict[str, Any]:
        """Return the fields of `config.json`, without token ids and dtype."""
        config, attention = self.config, self.config.block.attention
        content = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            **self.fixed_fields,
            "attention_bias": attention.o_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": config.rope.max_positions,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "initializer_range": config.init_std,
            "use_cache": True,
            # transformers 5 reads the first field, transformers 4 the others; without them
            # transformers 4 would silently use another base.
            "rope_parameters": describe_rope(config.rope),
            "rope_theta": config.rope.theta,
            "rope_scaling": None if config.rope.scaling is None else describe_rope(config.rope),
        }
        if isinstance(config.block.feed_forward, FeedForward.Config):
            content["intermediate_size"] = config.block.feed_forward.hidden_dim
            content["mlp_bias"] = config.block.feed_forward.bias
        if config.window is not None:
            windows = [config.get_window(layer) for layer in range(config.num_layers)]
            content["layer_types"] = [GLOBAL if window is None else LOCAL for window in windows]
        return content


def split_name(name: str) -> tuple[str, str, str]:
    """Split the name of a parameter into layer, module and leaf; the layer may be empty.

    Example:
        >>> split_name("layers.3.attention.qkv_proj.weight")
        ('3', 'attention.qkv_proj', 'weight')
    """
    layer = ""
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
    module, _, leaf = name.rpartition(".")
    return layer, module, leaf


def refuse_other_values(hf: dict[str, Any], valid: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a field with none of its valid values, whose last the message names."""
    for field, values in valid.items():
        if hf.get(field) not in values:
            raise ValueError(
                f"config.json: {field}={hf[field]!r} is not supported: must be {values[-1]!r}"
            )


def read_rope(hf: dict[str, Any]) -> RoPE.Config:
    """Read the rotation's base and scaling.

    They are in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`
    (transformers 4).

    Raises:
        ValueError: for a malformed field, a kind of scaling that is not one of `SCALINGS`, or two
            that differ.
    """
    if not hf.get("rope_scaling"):
        return _read_rope_at(hf, "rope_parameters")
    if not hf.get("rope_parameters"):
        return _read_rope_at(hf, "rope_scaling")

    # Versions of transformers do not agree which of the two fields counts.
    rope = _read_rope_at(hf, "rope_parameters")
    if rope != _read_rope_at(hf, "rope_scaling"):
        values = (
            f"rope_parameters={hf['rope_parameters']!r} and rope_scaling={hf['rope_scaling']!r}"
        )
        raise ValueError(f"config.json: {values} differ: must be the same, or one of them null")
    return rope


def _read_rope_at(hf: dict[str, Any], name: str) -> RoPE.Config:
    parameters = hf.get(name) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {name}={parameters!r}: must be an object")

    # Fields that the object lacks may stand beside it, as in transformers 4.
    max_positions = read_field(hf, "max_position_embeddings", int)
    rope: dict[str, Any] = {
        "rope_theta": hf.get("rope_theta") or 10_000.0,
        "partial_rotary_factor": hf.get("partial_rotary_factor") or 1.0,
        "original_max_position_embeddings": hf.get("original_max_position_embeddings")
        or max_positions,
    }
    common_fields = set(rope)
    rope |= _drop_nulls(parameters)

    rotated = rope.pop("partial_rotary_factor")
    if rotated != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor={rotated!r} is not supported: must be 1.0, or not "
            "given"
        )
    scaling = _read_scaling(rope, name=name, common_fields=common_fields)
    theta = read_field(rope, "rope_theta", float)
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta={theta!r}: must be above 1")
    return RoPE.Config(theta=theta, max_positions=max_positions, scaling=scaling)


def _read_scaling(
    rope: dict[str, Any], *, name: str, common_fields: Collection[str]
) -> RoPEScaling | None:
    """Return the scaling that the rope's parameters describe, None for the default.

    Args:
        name: field of `config.json` that they are from.
        common_fields: names that are valid with every kind of scaling.
    """
    # Both fields are removed: old files have "type", some both.
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise ValueError(
            f"config.json: {name} has rope_type {kind!r}, which is not supported: must be one of "
            f"{', '.join(('default', *SCALINGS))}"
        )
    scaling_fields = () if kind == "default" else fields(SCALINGS[kind])
    unknown = set(rope) - {field.name for field in scaling_fields} - set(common_fields)
    if unknown:
        raise ValueError(
            f"config.json: {name} has {', '.join(sorted(unknown))}: {kind!r} has no such field"
        )
    if kind == "default":
        return None

    types = {"float": float, "int": int, "bool": bool, "float | None": float}
    values = {}
    for field in scaling_fields:
        # A required field that is missing is read all the same, which raises the error.
        if field.name in rope or field.default is MISSING:
            values[field.name] = read_field(rope, field.name, types[str(field.type)])
    return SCALINGS[kind](**values)


def describe_rope(rope: RoPE.Config) -> dict[str, Any]:
    """Return the `rope_parameters` of a `config.json`."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": scaling.rope_type,
        "rope_theta": rope.theta,
        **_drop_nulls(asdict(scaling)),
    }


def _drop_nulls(content: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in content.items() if value is not None}


def read_field(hf: dict[str, Any], name: str, kind: type[F], default: F | None = None) -> F:
    """Return a field of a `config.json`: a boolean, or a positive number; else raise ValueError.

    Numbers must be finite, and integers such that a model of that size can be built.

    Example:
        >>> read_field({"hidden_size": 1024}, "hidden_size", int)
        1024
        >>> read_field({}, "rms_norm_eps", float, 1e-6)
        1e-06
    """
    value = default if hf.get(name) is None else hf[name]
    if kind is bool and isinstance(value, bool):
        return kind(value)
    # A float may be written as 10000; a boolean is an int in Python, but no number here.
    numbers = (int, float) if kind is float else kind
    most = _MAX_SIZES.get(name, _MAX_SIZE) if kind is int else sys.float_info.max
    if kind is not bool and isinstance(value, numbers) and value is not True and 0 < value <= most:
        return kind(value)

    valid = {
        bool: "true or false",
        int: f"an integer from 1 to {most}",
        float: "a positive number",
    }[kind]
    raise ValueError(f"config.json: {name}={value!r}: must be {valid}")
