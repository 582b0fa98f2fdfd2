"""vLLM's kernels in relay's model; the trainer runs the same definition with PyTorch's.

A norm or a rotation is one call here and several small ones in PyTorch. The kernels round otherwise
than the trainer's, so the batch-invariant mode uses none of them. On a CPU, linear layers also
multiply with packed weights; on a GPU, kernels do several operations at once, and tensor-parallel
ranks sum with vLLM's all-reduce.

Shape legend: T tokens, H query heads, K key-value heads of this rank, D head size, G = H / K, X = T
* K groups.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce

from actors.vllm.compat import build_packed_product, get_compiled_ops, import_custom_ops
from rl.distributed.sharding import local_tensor
from rl.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from rl.models.layers.norm import RMSNorm
from rl.models.parallelize import ShardedLinear, VocabShardedEmbedding

# Looked up once: a step calls them in every layer.
ops, compiled_ops = import_custom_ops(), get_compiled_ops()

NORM_MULTIPLE = 16
"""Divisor of the widths that vLLM's norm can do."""
FUSED_HEAD_DIMS = (64, 128, 256)
"""Head sizes of the kernel that normalizes and rotates 16-bit numbers."""
HAS_FUSED_HEADS = hasattr(compiled_ops, "fused_qk_norm_rope")
"""True in vLLM's builds for GPUs."""


def use_kernels(model: nn.Module, *, on_gpu: bool = False) -> None:
    """Replace layers of a model by vLLM's kernels, in place; parameters keep their names."""
    rotation: Rotation | None = None
    # Lists, because layers are replaced during the walk. A replaced layer holds the parameters of
    # the layer before, so that an update of the weights writes where the kernels read.
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is RMSNorm and layer.normalized_shape[0] % NORM_MULTIPLE == 0:
                setattr(parent, name, Norm(layer))
            elif type(layer) is nn.Linear and not on_gpu:
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))

        if isinstance(parent, Attention):
            # Shared by all layers: the first of a forward makes the table, the others find it.
            rotation = rotation or Rotation(num_groups=_count_groups(parent) if on_gpu else 1)
            parent.rotate = rotation
            if on_gpu:
                parent.split_heads = Heads(parent, rotation)
        elif on_gpu and isinstance(parent, FeedForward):
            parent.activation = {"swiglu": swiglu, "geglu": geglu}[parent.config.activation]
        elif on_gpu and isinstance(parent, ShardedLinear | VocabShardedEmbedding):
            parent.all_reduce = tensor_model_parallel_all_reduce

    if on_gpu:
        _let_norms_add(model)  # Last, because it looks for the norms that were put in.


def run_both_kernels(model: Decoder, ids_T: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the hidden states [T, E] with PyTorch's kernels and with a GPU's, to compare them."""
    fused = copy.deepcopy(model)
    use_kernels(fused, on_gpu=True)
    with torch.no_grad():
        return model(ids_T, **inputs), fused(ids_T, **inputs)


class PackedLinear(nn.Module):
    """Linear layer that multiplies with a copy of its weight, ordered for the processor's kernel.

    An update writes the parameter. `pack` must follow, and costs about as much as a step.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, in_float32: bool = False
    ) -> None:
        """`in_float32`: multiply and return float32; without a bias."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.in_float32 = in_float32
        self._product: Callable[[Tensor], Tensor] | None = None

    def pack(self) -> None:
        weight = self.weight.float() if self.in_float32 else self.weight
        self._product = build_packed_product(weight, self.bias)

    def unpack(self) -> None:
        """Give back the copy."""
        self._product = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if self.in_float32 else x
        if self._product is not None:
            return self._product(x)
        return F.linear(x, self.weight.float() if self.in_float32 else self.weight, self.bias)


class Norm(nn.Module):
    """RMS norm in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor | Residual) -> Tensor:
        if isinstance(x, Residual):
            normalized = x.add_and_normalize(self.weight, self.eps)
            if normalized is not None:
                return normalized
            x = x.sum()

        # A GPU's kernel takes rows at any stride.
        if not x.is_cuda:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ops.rms_norm(out, x, self.weight, self.eps)
        return out


class Residual:
    """Stream of hidden states whose last summand is added by the next norm, in the same kernel."""

    def __init__(self, x_TE: Tensor, added_TE: Tensor | None = None) -> None:
        self._x_TE, self._added_TE = x_TE, added_TE

    def __add__(self, added_TE: Tensor) -> Residual:
        return Residual(self.sum(), added_TE)

    def sum(self) -> Tensor:
        if self._added_TE is not None:
            self._x_TE, self._added_TE = self._x_TE + self._added_TE, None
        return self._x_TE

    def add_and_normalize(self, weight: Tensor, eps: Any) -> Tensor | None:
        """Return the normalized sum, in the memory of the summand; None without a summand."""
        added_TE, self._added_TE = self._added_TE, None
        if added_TE is not None:
            # The kernel writes twice: the sum to the stream, and the norm of it to the summand.
            ops.fused_add_rms_norm(added_TE, self._x_TE, weight, eps)
        return added_TE

    @staticmethod
    def begin(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (Residual(inputs[0]), *inputs[1:])

    @staticmethod
    def end(block: nn.Module, inputs: tuple[Any, ...], stream: Residual) -> Tensor:
        return stream.sum()


def _let_norms_add(model: nn.Module) -> None:
    """Let norms add, unless a block has a forward of its own or norms of another kind."""
    blocks = [block for block in model.modules() if isinstance(block, TransformerBlock)]
    for block in blocks:
        # Another forward may use the stream in a way that `Residual` does not have.
        has_own_forward = type(block).forward is not TransformerBlock.forward
        has_norms = isinstance(block.attention_norm, Norm) and isinstance(block.ffn_norm, Norm)
        if has_own_forward or not has_norms:
            return

    if blocks:
        blocks[0].register_forward_pre_hook(Residual.begin)
        blocks[-1].register_forward_hook(Residual.end)


def swiglu(gate_up_TK2W: Tensor) -> Tensor:
    return _apply_gate(compiled_ops.silu_and_mul, gate_up_TK2W)


def geglu(gate_up_TK2W: Tensor) -> Tensor:
    return _apply_gate(compiled_ops.gelu_tanh_and_mul, gate_up_TK2W)


def _apply_gate(kernel: Callable[[Tensor, Tensor], None], gate_up_TK2W: Tensor) -> Tensor:
    gate_up_X2W = gate_up_TK2W.flatten(0, 1)
    out_XW = gate_up_X2W.new_empty(gate_up_X2W.size(0), gate_up_X2W.size(2))
    kernel(out_XW, gate_up_X2W.flatten(1))
    return out_XW.view(gate_up_TK2W.size(0), -1)


class Rotation:
    """`rl.models.layers.rope.rotate` in one kernel, which reads cosines and sines from one table.

    Shared by all layers.
    """

    def __init__(self, *, num_groups: int = 1) -> None:
        """`num_groups`: consecutive rows with the angles of one token."""
        self._num_groups = num_groups
        self._known: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        table_TD, rows_T = self.get_angles(cos_T1D, sin_T1D)
        x_THD = x_THD.contiguous()
        ops.rotary_embedding(rows_T, x_THD.flatten(1), None, x_THD.size(-1), table_TD, True)
        return x_THD

    def get_angles(self, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table of cosines and sines, and the row of each group in it, [X] int64."""
        for cos, table_TD, rows_X in self._known:
            if cos is cos_T1D:
                return table_TD, rows_X

        # The first layer of a forward comes here. The halves of a head have the same angles.
        half = cos_T1D.size(-1) // 2
        table_TD = torch.cat((cos_T1D[:, 0, :half], sin_T1D[:, 0, :half]), dim=-1)
        rows_T1 = torch.arange(len(cos_T1D), device=cos_T1D.device).unsqueeze(1)
        rows_X = rows_T1.repeat(1, self._num_groups).flatten()

        # A model has at most two ropes.
        self._known = [(cos_T1D, table_TD, rows_X), *self._known[:1]]
        return table_TD, rows_X


class Heads(nn.Module):
    """`rl.models.decoder.split_heads` in two kernels: normalize with rotate, and sort heads.

    Norms or sizes that the first kernel cannot do get kernels of their own.

    The kernels expect the query heads of a token first, then its key heads, then its value heads. A
    projection's rows are ordered by group, so they get each group of a token as a token of its own,
    with one key and one value head.
    """

    order: Tensor

    def __init__(self, layer: Attention, rotation: Rotation) -> None:
        super().__init__()
        self._rotation = rotation
        weight, size = local_tensor(layer.qkv_proj.weight), layer.group_size
        num_groups = _count_groups(layer)
        self._sizes = [num_groups * size, num_groups, num_groups]

        # Heads by group, in the order of the projection's rows; sorted by kind for the attention.
        heads = torch.arange(num_groups * (size + 2), device=weight.device).view(-1, size + 2)
        query, key, value = heads.split((size, 1, 1), dim=1)
        order = torch.cat((query.flatten(), key.flatten(), value.flatten()))
        # A buffer, because vLLM keeps buffers while the engine sleeps.
        self.register_buffer("order", order, persistent=False)

        self._is_plain = layer.q_norm is None and layer.query_scale == 1.0
        self._is_fused = (
            isinstance(layer.q_norm, Norm)
            and isinstance(layer.k_norm, Norm)
            and layer.query_scale == 1.0
            and weight.itemsize == 2
            and layer.head_dim in FUSED_HEAD_DIMS
            and HAS_FUSED_HEADS
        )

    def forward(
        self, layer: Attention, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, K, D]; `qkv` may be overwritten."""
        num_tokens, size, dim = qkv.size(0), layer.group_size, layer.head_dim
        table, rows = self._rotation.get_angles(cos, sin)
        groups = qkv.view(-1, size + 2, dim)
        q, k, v = groups.split((size, 1, 1), dim=1)

        if not (self._is_fused or self._is_plain):
            q = q.contiguous() if layer.q_norm is None else layer.q_norm(q)
            k = k.contiguous() if layer.k_norm is None else layer.k_norm(k)
            if layer.query_scale != 1.0:
                q = q * layer.query_scale
            ops.rotary_embedding(rows, q.flatten(1), k.flatten(1), dim, table, True)
            return (
                q.contiguous().view(num_tokens, -1, dim),
                k.contiguous().view(num_tokens, -1, dim),
                v.contiguous().view(num_tokens, -1, dim),
            )

        # In place: `q` and `k` are views of the projection, whose heads are sorted afterwards.
        if self._is_fused:
            assert isinstance(layer.q_norm, Norm)
            assert isinstance(layer.k_norm, Norm)
            ops.fused_qk_norm_rope(
                groups.flatten(1), size, 1, 1, dim, layer.q_norm.eps, layer.q_norm.weight,
                layer.k_norm.weight,
                table, True, rows,
            )  # fmt: skip
        else:
            ops.rotary_embedding(rows, q.flatten(1), k.flatten(1), dim, table, True)
        sorted_heads = qkv.view(num_tokens, -1, dim).index_select(1, self.order)
        return sorted_heads.split(self._sizes, dim=1)


def _count_groups(layer: Attention) -> int:
    return local_tensor(layer.qkv_proj.weight).size(0) // ((layer.group_size + 2) * layer.head_dim)
