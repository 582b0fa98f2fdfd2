"""Hugging Face names, tensors and config.json of decoders whose checkpoints follow Llama's naming.

Our fused weights order their rows by key-value head, or group of feed-forward rows
(`rl.models.decoder`), so each consists of several Hugging Face weights, regrouped; all other
parameters are renamed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rl.config.configurable import Configurable
from rl.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from rl.models.rope import SCALINGS, RoPE, RoPEScaling

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
    """Translation between our parameters and Hugging Face's tensors; a family is a subclass that
    names what differs.

    A large model is read and written as a stream of whole, unsharded CPU tensors. Meta tensors work
    too, for shapes.
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
        """Return the config of a model of the family; `sizes` are the other fields of
        `Decoder.Config`.
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
        architectures = hf.get("architectures") or [cls.architecture]
        is_list = isinstance(architectures, list)
        if (
            hf.get("model_type") != cls.model_type
            or not is_list
            or cls.architecture not in architectures
        ):
            raise ValueError(
                f"config.json: model_type={hf.get('model_type')!r}, "
                f"architectures={architectures!r}: a checkpoint of another architecture; must be "
                f"{cls.model_type!r} and [{cls.architecture!r}]"
            )
        refuse_other_values(
            hf,
            {
                "quantization_config": (None,),
                **{field: (None, value) for field, value in cls.fixed_fields.items()},
            },
        )
        num_layers = read_field(hf, "num_hidden_layers", int)
        window, global_layers = cls.read_windows(hf, num_layers)
        rope = read_rope(hf)
        dim, num_heads = (
            read_field(hf, "hidden_size", int),
            read_field(hf, "num_attention_heads", int),
        )
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
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `sized` that are not sizes; raise ValueError for unsupported
        values.
        """
        return {"attention_bias": read_field(hf, "attention_bias", bool, False)}

    @classmethod
    def read_windows(
        cls, hf: dict[str, Any], num_layers: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the sliding window, or None, and the layers without one."""
        window = None
        if cls.always_windowed or read_field(hf, "use_sliding_window", bool, False):
            given = hf.get("sliding_window", 4096)
            window = (
                None
                if given is None
                else read_field({"sliding_window": given}, "sliding_window", int)
            )
        kinds = hf.get("layer_types")
        if kinds is None:
            kinds = [
                GLOBAL if window is None or cls.is_global(hf, layer) else LOCAL
                for layer in range(num_layers)
            ]
        valid = [GLOBAL] if window is None else [GLOBAL, LOCAL]
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(k not in valid for k in kinds)
        ):
            raise ValueError(
                f"config.json: layer_types={kinds!r}: must be a list of {num_layers} of "
                f"{' and '.join(valid)}, with sliding_window={hf.get('sliding_window')!r} and "
                f"use_sliding_window={hf.get('use_sliding_window')!r}"
            )
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
        """Return the Hugging Face names of a parameter's tensors, in order; raise KeyError if it is
        unknown.
        """
        if name in _TOP:
            return [_TOP[name]]
        layer, module, leaf = split_name(name)
        if module not in self.layer_names or leaf not in (
            ("weight", "bias") if module in _MAY_HAVE_BIAS else ("weight",)
        ):
            raise KeyError(
                f"{name!r} is not a parameter of {type(self).__name__.removesuffix('Adapter')}"
            )
        return [
            f"model.layers.{layer}.{hf_module}.{leaf}" for hf_module in self.layer_names[module]
        ]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return the parameter made of the tensors of `hf_names(name)`."""
        return (
            tensors[0]
            if len(tensors) == 1
            else self.join_groups(tensors, num_groups=self._count_groups(name))
        )

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of the parameter."""
        _, module, _ = split_name(name)
        shares = {_QKV: (self.group_size, 1, 1), _GATE_UP: (1, 1)}.get(module)
        groups = self._count_groups(name)
        parts = [tensor] if shares is None else self.split_groups(tensor, shares, num_groups=groups)
        return dict(zip(self.hf_names(name), parts, strict=True))

    def _count_groups(self, name: str) -> int:
        return self.num_kv_heads if _QKV in name else self.num_groups

    def join_groups(self, tensors: Sequence[Tensor], *, num_groups: int) -> Tensor:
        """Return the rows of all tensors, ordered by group."""
        return torch.cat([x.unflatten(0, (num_groups, -1)) for x in tensors], dim=1).flatten(0, 1)

    def split_groups(
        self, tensor: Tensor, shares: Sequence[int], *, num_groups: int
    ) -> list[Tensor]:
        """Return the tensors that `join_groups` joined, given the ratios of their numbers of rows."""
        groups = tensor.unflatten(0, (num_groups, sum(shares), -1))
        return [part.flatten(0, 2) for part in groups.split(list(shares), dim=1)]

    def hf_config(self) -> dict[str, Any]:
        """Return the fields of `config.json` that all families share, without token ids and
        dtype.
        """
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
            windows = map(config.get_window, range(config.num_layers))
            content["layer_types"] = [GLOBAL if window is None else LOCAL for window in windows]
        return content


def split_name(name: str) -> tuple[str, str, str]:
    """Split `layers.3.attention.qkv_proj.weight` into layer, module and leaf; the layer may be
    empty.
    """
    layer = ""
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
    module, _, leaf = name.rpartition(".")
    return layer, module, leaf


def refuse_other_values(hf: dict[str, Any], valid: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a field with none of its valid values; the message names the last of
    them.
    """
    for field, values in valid.items():
        if hf.get(field) not in values:
            raise ValueError(
                f"config.json: {field}={hf[field]!r} is not supported: must be {values[-1]!r}"
            )


def read_rope(hf: dict[str, Any]) -> RoPE.Config:
    """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (transformers
    4).

    Raises:
        ValueError: for a malformed field, a kind of scaling that is not one of `SCALINGS`, or two
            that differ.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if hf.get(name)] or [
        "rope_parameters"
    ]
    found = [_read_rope_at(hf, name) for name in names]
    if found[0] != found[-1]:  # Versions of transformers do not agree which of the two counts.
        values = " and ".join(f"{name}={hf[name]!r}" for name in names)
        raise ValueError(f"config.json: {values} differ: must be the same, or one of them null")
    return found[0]


def _read_rope_at(hf: dict[str, Any], name: str) -> RoPE.Config:
    given = hf.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.json: {name}={given!r}: must be an object")
    max_positions = read_field(hf, "max_position_embeddings", int)
    outside = {
        "rope_theta": hf.get("rope_theta") or 10_000.0,
        "partial_rotary_factor": hf.get("partial_rotary_factor") or 1.0,
        "original_max_position_embeddings": hf.get("original_max_position_embeddings")
        or max_positions,
    }
    rope = outside | {field: value for field, value in given.items() if value is not None}
    if (rotated := rope.pop("partial_rotary_factor")) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor={rotated!r} is not supported: must be 1.0, or not "
            "given"
        )
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise ValueError(
            f"config.json: {name} has rope_type {kind!r}, which is not supported: must be one of "
            f"{', '.join(('default', *SCALINGS))}"
        )
    known = () if kind == "default" else fields(SCALINGS[kind])
    if unknown := set(rope) - {f.name for f in known} - set(outside):
        raise ValueError(
            f"config.json: {name} has {', '.join(sorted(unknown))}: {kind!r} has no such field"
        )
    types = {"float": float, "int": int, "bool": bool, "float | None": float}
    values = {
        f.name: read_field(rope, f.name, types[str(f.type)])
        for f in known
        if f.name in rope or f.default is MISSING
    }
    if (theta := read_field(rope, "rope_theta", float)) <= 1:
        raise ValueError(f"config.json: rope_theta={theta!r}: must be above 1")
    return RoPE.Config(
        theta=theta,
        max_positions=max_positions,
        scaling=SCALINGS[kind](**values) if known else None,
    )


def describe_rope(rope: RoPE.Config) -> dict[str, Any]:
    """Return the `rope_parameters` of a `config.json`."""
    scaling = rope.scaling
    kept = {} if scaling is None else {k: v for k, v in asdict(scaling).items() if v is not None}
    return {
        "rope_type": "default" if scaling is None else scaling.rope_type,
        "rope_theta": rope.theta,
        **kept,
    }


def read_field(hf: dict[str, Any], name: str, kind: type[F], default: F | None = None) -> F:
    """Return a field of a `config.json`: a boolean, or a positive number; else raise ValueError.

    Numbers must be finite, and integers such that a model of that size can be built.
    """
    value = default if hf.get(name) is None else hf[name]
    if kind is bool and isinstance(value, bool):
        return kind(value)
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
