"""Decoder-only transformer: pre-norm blocks, grouped-query attention, rotary positions, gated
feed-forward layers.

One definition for trainer and generator, and for every family of this kind: switches in the configs
tell the families apart. The model runs on a flat axis of T tokens, which is both a packed training
batch and the form in which vLLM calls a model; only the core attention differs and is passed in.

Projections are fused, with the rows of a fused weight ordered by key-value head: group g holds its
query heads, its key head and its value head; likewise its share of the gate rows, then of the up
rows. A plain row split (`Shard(0)`) over any tensor-parallel degree that divides the key-value
heads therefore gives each rank whole groups, and weights move between layouts unchanged. Biases
follow the rows of their weights.

Shape legend: T tokens, E model width, V vocabulary, H query heads, K key-value heads, D head size,
G = H / K queries per group, F feed-forward width, P positions, W = F / K feed-forward width of one
group.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.config.configurable import Configurable
from rl.distributed.sharding import local_tensor, slice_local_shard
from rl.models.compat import is_persistent
from rl.models.layers.attention import PackedAttention, SequenceLayout
from rl.models.layers.norm import OffsetRMSNorm, RMSNorm
from rl.models.layers.rope import RoPE, rotate
from rl.models.low_rank.layer import AdaptedWeight, LowRank
from rl.models.low_rank.types import Bank


class Attention(Configurable, nn.Module):
    """Grouped-query attention of one block: fused projection, rotation, core, output projection.

    The core, which attends, is passed in: packed segments in the trainer, a paged cache in vLLM.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Heads of the attention, and the switches by which families differ."""

        num_heads: int
        num_kv_heads: int
        """Number of key-value heads; divides `num_heads`."""
        head_dim: int = 128
        qk_norm: bool = True
        """Normalize queries and keys per head, before the rotation."""
        qkv_bias: bool = False
        """Add biases to queries, keys and values."""
        o_bias: bool = False
        """Add a bias to the output."""
        scale_dim: int | None = None
        """Number whose inverse square root scales the products of queries and keys; None: the head
        size.
        """

        def __post_init__(self) -> None:
            if self.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_heads={self.num_heads} is not a multiple of "
                    f"num_kv_heads={self.num_kv_heads}"
                )

    def __init__(
        self, *, config: Config, dim: int, norm: Callable[[int], nn.Module], core: nn.Module
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        # Every core divides the scores by the root of the head size. Gemma's other divisor is
        # therefore a factor of the queries, and the cores stay the same for all families.
        self.query_scale = (config.head_dim / (config.scale_dim or config.head_dim)) ** 0.5
        self.group_size = config.num_heads // config.num_kv_heads

        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(dim, width, bias=config.qkv_bias)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.core = core
        # Attributes, so that the generator can put vLLM's fused kernels in their place.
        self.rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
        self.split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = split_heads
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, dim, bias=config.o_bias)

    def forward(
        self, x_TE: Tensor, cos: Tensor, sin: Tensor, sequences: SequenceLayout | None
    ) -> Tensor:
        """Return the attention's result, [T, E]; `cos` and `sin` are [T, 1, D]."""
        q_THD, k_TKD, v_TKD = self.split_heads(self, self.qkv_proj(x_TE), cos, sin)
        out = self.core(q_THD, k_TKD, v_TKD, sequences)
        return self.o_proj(out.flatten(1))


def split_heads(
    layer: Attention, qkv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's queries [T, H, D], keys and values [T, K, D], normalized and rotated."""
    # Under tensor parallelism this rank's output holds K / tp whole groups: -1 counts them.
    qkv = qkv.unflatten(-1, (-1, layer.group_size + 2, layer.head_dim))
    q_TKGD, k_TK1D, v_TK1D = qkv.split((layer.group_size, 1, 1), dim=2)
    q_THD, k_TKD = q_TKGD.flatten(1, 2), k_TK1D.flatten(1, 2)

    # Norms before the rotation: their weights differ by dimension, which the rotation mixes.
    if layer.q_norm is not None and layer.k_norm is not None:
        q_THD, k_TKD = layer.q_norm(q_THD), layer.k_norm(k_TKD)
    if layer.query_scale != 1.0:
        q_THD = q_THD * layer.query_scale
    return layer.rotate(q_THD, cos, sin), layer.rotate(k_TKD, cos, sin), v_TK1D.flatten(1, 2)


def swiglu(gate_up_TK2W: Tensor) -> Tensor:
    """Return silu(gate) * up of all groups, [T, K * W]."""
    gate, up = gate_up_TK2W.unbind(dim=2)
    return (F.silu(gate) * up).flatten(1)


def geglu(gate_up_TK2W: Tensor) -> Tensor:
    """Return gelu(gate) * up of all groups, [T, K * W], with the approximation by tanh."""
    gate, up = gate_up_TK2W.unbind(dim=2)
    return (F.gelu(gate, approximate="tanh") * up).flatten(1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "geglu": geglu}


class FeedForward(Configurable, nn.Module):
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)), from [T, E] to [T, E]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Width and activation of the feed-forward layer."""

        hidden_dim: int
        """Feed-forward width, F."""
        activation: Literal["swiglu", "geglu"] = "swiglu"
        bias: bool = False
        """Add biases to all projections."""

    def __init__(self, *, config: Config, dim: int, num_kv_heads: int) -> None:
        super().__init__()
        self.config = config

        # Gate and up rows alternate by group, so that a tensor-parallel rank has both of its
        # groups. The greatest common divisor, because the width need not be a multiple of the
        # number of key-value heads.
        self.group_width = config.hidden_dim // math.gcd(config.hidden_dim, num_kv_heads)
        self.gate_up_proj = nn.Linear(dim, 2 * config.hidden_dim, bias=config.bias)
        self.down_proj = nn.Linear(config.hidden_dim, dim, bias=config.bias)
        # An attribute, so that batch-invariant mode can replace the function.
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        # Under tensor parallelism this rank's output holds some of the groups: -1 counts them.
        gate_up = self.gate_up_proj(x_TE).unflatten(-1, (-1, 2, self.group_width))
        return self.down_proj(self.activation(gate_up))


class TransformerBlock(Configurable, nn.Module):
    """One layer of the decoder: attention, then feed-forward, each added to its input, [T, E].

    Both take normalized inputs (pre-norm); with `post_norms` their results are normalized too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Parts of a block, the same in all layers of a model."""

        attention: Attention.Config
        feed_forward: Configurable.Config
        """`FeedForward.Config`, or the config of a layer with the same interface
        (`rl.models.layers.moe`)."""
        post_norms: bool = False
        """Normalize the results of attention and feed-forward too, before they are added."""

    def __init__(
        self, *, config: Config, dim: int, norm: Callable[[int], nn.Module], core: nn.Module
    ) -> None:
        super().__init__()
        # `init_weights` draws in the order of the parameters, and so of these assignments.
        self.attention_norm = norm(dim)
        self.attention: Attention = config.attention.build(dim=dim, norm=norm, core=core)
        self.attention_post_norm = norm(dim) if config.post_norms else nn.Identity()

        self.ffn_norm = norm(dim)
        self.feed_forward: nn.Module = config.feed_forward.build(
            dim=dim, num_kv_heads=config.attention.num_kv_heads
        )
        self.ffn_post_norm = norm(dim) if config.post_norms else nn.Identity()

    def forward(
        self, x_TE: Tensor, cos: Tensor, sin: Tensor, sequences: SequenceLayout | None
    ) -> Tensor:
        attended_TE = self.attention(self.attention_norm(x_TE), cos, sin, sequences)
        x_TE = x_TE + self.attention_post_norm(attended_TE)
        return x_TE + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_TE)))


class Elsewhere(nn.Module):
    """Stand-in for a module that another stage of a pipeline has."""

    def forward(self, x_TE: Tensor, *others: Any) -> Tensor:
        return x_TE


def _build_packed_attention(layer: int, window: int | None) -> nn.Module:
    return PackedAttention(window=window)


class Decoder(Configurable, nn.Module):
    """The model type that trainers, generators and samplers program against."""

    row_multiple = 1
    """Number whose multiples are valid token counts of a forward."""
    float32_head = False
    """Compute the logits in float32 from hidden states and a weight of any dtype."""
    bank: Bank | None = None
    """Adapters of a sampler, of which each row of a forward has its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Sizes of a model and the switches of its family; `build()` makes the module."""

        vocab_size: int
        dim: int
        """Model width, E."""
        num_layers: int
        tie_embeddings: bool = True
        """Share the embedding's weight with the output head."""
        norm_eps: float = 1e-6
        norm_offset: bool = False
        """Keep norm weights as their distances from 1, and normalize in float32."""
        scale_embeddings: bool = False
        """Multiply the embeddings by the square root of the width."""
        init_std: float = 0.02
        """Standard deviation of fresh weights."""
        block: TransformerBlock.Config
        rope: RoPE.Config = field(default_factory=RoPE.Config)
        window: int | None = None
        """Number of latest tokens, its own included, that a token sees; None: all."""
        global_layers: tuple[int, ...] = ()
        """Layers without a window."""
        local_rope: RoPE.Config | None = None
        """Positions of the layers with a window; None: as of the others."""

        def get_window(self, layer: int) -> int | None:
            """Return the window of a layer."""
            return None if layer in self.global_layers else self.window

        def build_norm(self, width: int) -> nn.RMSNorm:
            """Return a norm of the model's kind over vectors of this width."""
            kind = OffsetRMSNorm if self.norm_offset else RMSNorm
            return kind(width, eps=self.norm_eps)

        @property
        def has_experts(self) -> bool:
            """True if the feed-forward layers are mixtures of experts."""
            return self.num_experts > 0

        @property
        def num_experts(self) -> int:
            """Number of experts of each feed-forward layer; 0 for a dense model."""
            return getattr(self.block.feed_forward, "num_experts", 0)

    def __init__(
        self,
        *,
        config: Config,
        core_attention: Callable[[int, int | None], nn.Module] = _build_packed_attention,
    ) -> None:
        """Build the model.

        Args:
            core_attention: called with the number of a layer and its window; returns the attention
                between that layer's projections.
        """
        super().__init__()
        self.config = config

        # The order of the modules is the order in which `init_weights` draws.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        head_dim = config.block.attention.head_dim
        self.rope: RoPE = config.rope.build(head_dim=head_dim)
        local = config.local_rope
        self.local_rope: RoPE | None = None if local is None else local.build(head_dim=head_dim)

        self.layers = nn.ModuleList()
        for number in range(config.num_layers):
            core = core_attention(number, config.get_window(number))
            block: TransformerBlock = config.block.build(
                dim=config.dim, norm=config.build_norm, core=core
            )
            self.layers.append(block)

        self.norm = config.build_norm(config.dim)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.lm_head_lora: LowRank | None = None
        """Adapter of the head, set by a converter; the head's weight is used without its layer's
        forward.
        """

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head without its adapter, [V, E]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids_T: Tensor,
        *,
        positions: Tensor,
        sequences: SequenceLayout | None = None,
        head: Callable[[Tensor, Any], Any] | None = None,
    ) -> Any:
        """Return the final hidden states [T, E], or `head(hidden [T, E], head weight [V, E])`.

        The weight of a head with an adapter is an `AdaptedWeight`.

        The head runs inside the forward, where sharding hooks have gathered its weight. A stage of
        a pipeline takes the hidden states of the stage before it in place of ids.

        Args:
            positions: [T] int64, restarting at 0 with each sequence.
            sequences: layout of the packed sequences; None if the core attention has its own.

        Example:
            Two sequences of 3 and 2 tokens in one forward, of the tiny model of width 128:

            >>> model = model_spec("qwen3", "tiny").model.build()
            >>> ids, positions = torch.tensor([5, 7, 9, 5, 7]), torch.tensor([0, 1, 2, 0, 1])
            >>> layout = SequenceLayout.from_lengths([3, 2])
            >>> model(ids, positions=positions, sequences=layout).shape
            torch.Size([5, 128])
            >>> model(ids, positions=positions, sequences=layout, head=linear_head).shape
            torch.Size([5, 320])
        """
        x_TE = input_ids_T if isinstance(self.embed_tokens, Elsewhere) else self.embed(input_ids_T)

        # Once for all layers: the tables depend on the positions alone.
        rotation = local = self.tables(self.rope, positions, dtype=x_TE.dtype)
        if self.local_rope is not None:
            local = self.tables(self.local_rope, positions, dtype=x_TE.dtype)
        for i, layer in enumerate(self.layers):
            cos, sin = rotation if self.config.get_window(i) is None else local
            x_TE = layer(x_TE, cos, sin, sequences)

        hidden_TE = x_TE if isinstance(self.norm, Elsewhere) else self.normed(x_TE)
        return hidden_TE if head is None else head(*self.prepare_head_inputs(hidden_TE))

    def prepare_head_inputs(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor | AdaptedWeight]:
        """Return the hidden states and the head's weight as the logits' product takes them."""
        weight_VE = self.head_weight
        if self.float32_head:
            hidden_TE, weight_VE = hidden_TE.float(), weight_VE.float()
        adapter = self.lm_head_lora
        if adapter is None:
            return hidden_TE, weight_VE
        return hidden_TE, AdaptedWeight(weight=weight_VE, adapter=adapter, dtype=weight_VE.dtype)

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """Return the first hidden states, [T, E]."""
        x_TE: Tensor = self.embed_tokens(input_ids_T)
        if self.config.scale_embeddings:
            # The factor is rounded to the dtype, as in transformers.
            x_TE = x_TE * x_TE.new_full((), self.config.dim**0.5)
        return x_TE

    def tables(self, rope: RoPE, positions: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines that turn queries and keys, [T, 1, D] each."""
        cos, sin = rope(positions)
        return cos.to(dtype), sin.to(dtype)

    def normed(self, x_TE: Tensor) -> Tensor:
        """Return the last hidden states as the output head takes them, [T, E]."""
        hidden_TE: Tensor = self.norm(x_TE)
        return hidden_TE

    @torch.no_grad()
    def init_weights(
        self, *, seed: int, std: float | None = None, names: Collection[str] | None = None
    ) -> None:
        """Set normal weights, unit norms and zero biases.

        A seed gives the same numbers in every layout.

        Args:
            names: parameters to set; None for all.
        """
        std = self.config.init_std if std is None else std
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            if name.endswith("norm.weight"):
                parameter.fill_(0.0 if self.config.norm_offset else 1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                # Drawn whole and sliced, although a rank needs its part alone: the numbers then do
                # not depend on the layout. On the CPU, so that they do not depend on the device.
                whole = torch.randn(parameter.shape, generator=generator) * std
                local_tensor(parameter).copy_(slice_local_shard(whole, parameter))


def take_part(model: Decoder, modules: Collection[str]) -> Decoder:
    """Return a model with only some of the modules, which it shares with `model`.

    The names are those of `list_module_names`: embed_tokens, layers.0, ..., norm, lm_head. The
    other modules pass on what they are given.
    """
    part = copy.copy(model)
    # A copied module shares the dicts of its submodules and hooks with the original.
    for name, value in list(vars(part).items()):
        if isinstance(value, dict):
            vars(part)[name] = copy.copy(value)

    for name in ("embed_tokens", "norm"):
        if name not in modules:
            setattr(part, name, Elsewhere())
    if "lm_head" not in modules:
        part.lm_head = part.lm_head_lora = None
    # Stand-ins keep the numbers of the layers, and so the names of the parameters.
    part.layers = nn.ModuleList()
    for number, layer in enumerate(model.layers):
        part.layers.append(layer if f"layers.{number}" in modules else Elsewhere())

    # Nothing but tables, which each part computes for itself.
    part.rope, part.local_rope = copy.deepcopy((model.rope, model.local_rope))
    return part


def list_module_names(config: Decoder.Config) -> list[str]:
    """Return the names of a model's modules with parameters, in the order of the forward."""
    names = ["embed_tokens", *(f"layers.{number}" for number in range(config.num_layers)), "norm"]
    return names if config.tie_embeddings else [*names, "lm_head"]


def linear_head(hidden_TE: Tensor, weight: Tensor | AdaptedWeight) -> Tensor:
    """Return the logits, [T, V]."""
    if isinstance(weight, AdaptedWeight):
        return weight.get_factors().add_to(F.linear(hidden_TE, weight.weight), hidden_TE)
    return F.linear(hidden_TE, weight)


def find_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the weights, by name, such as a load-balance bias.

    Buffers that a model can recompute, such as tables, are registered with `persistent=False`.
    """
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def reset_buffers(model: nn.Module) -> None:
    """Call `reset_buffers` of every module that has one, after `to_empty`."""
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
