"""vLLM's kernels in relay's model; the trainer runs the same definition with PyTorch's.

A norm or a rotation is one call here and several small ones in PyTorch. The kernels round otherwise than the
trainer's, so the batch-invariant mode uses none of them.

Shape legend: T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import _custom_ops as ops

from actors.vllm.compat import packed_product
from rl.models.decoder import Attention, RMSNorm

NORM_MULTIPLE = 16
"""Divisor of the widths that vLLM's norm can do."""


def use_kernels(model: nn.Module) -> None:
    """Replace layers of a model by vLLM's kernels, in place; parameters keep their names."""
    rotation = Rotation()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is RMSNorm and layer.normalized_shape[0] % NORM_MULTIPLE == 0:
                setattr(parent, name, Norm(layer))
            elif type(layer) is nn.Linear:
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))
        if isinstance(parent, Attention):
            parent.rotate = rotation


class PackedLinear(nn.Module):
    """Linear layer that multiplies with a copy of its weight in the order in which the processor's kernel reads it.

    The parameter is what an update writes. `pack` must follow, and costs about as much as a step.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._product: Callable[[Tensor], Tensor] | None = None

    def pack(self) -> None:
        self._product = packed_product(self.weight, self.bias)

    def unpack(self) -> None:
        """Give back the copy."""
        self._product = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self._product is None else self._product(x)


class Norm(nn.Module):
    """RMS norm in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ops.rms_norm(out, x, self.weight, self.eps)
        return out


class Rotation:
    """`rl.models.rope.rotate` in one kernel, which reads cosines and sines from one table. Shared by all layers."""

    def __init__(self) -> None:
        self._cos_T1D: Tensor | None = None

    def __call__(self, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        if cos_T1D is not self._cos_T1D:  # the first layer of a forward
            # The halves of a head have the same angles.
            half = cos_T1D.size(-1) // 2
            self._table_TD = torch.cat((cos_T1D[:, 0, :half], sin_T1D[:, 0, :half]), dim=-1)
            self._rows_T = torch.arange(len(cos_T1D), device=cos_T1D.device)
            self._cos_T1D = cos_T1D
        x_THD = x_THD.contiguous()
        ops.rotary_embedding(self._rows_T, x_THD.flatten(1), None, x_THD.size(-1), self._table_TD, True)
        return x_THD
