"""Many linear layers at once, each over its own run of rows.

Shape legend: S rows, N groups, E features in, F features out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALIGNMENT = 16
"""Bytes; the grouped kernel's rows have to start at a multiple of it."""


def grouped_linear(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """[S, F]: rows up to `ends_N[0]` times the first weight, from there to `ends_N[1]` the second, and so on.

    On a GPU in bfloat16 one kernel, and the host waits for nothing; elsewhere a product a group.

    Args:
        ends_N: int64, not decreasing, the last of them S.
    """
    if _has_kernel(x_SE, weight_NFE):
        return one_kernel(x_SE, weight_NFE, ends_N)
    product: Tensor = _GroupedLinear.apply(x_SE, weight_NFE, ends_N.tolist())
    return product


def one_kernel(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """The same by PyTorch's grouped product."""
    out = torch.nn.functional.grouped_mm(x_SE, weight_NFE.transpose(1, 2), offs=ends_N.to(torch.int32))
    assert isinstance(out, Tensor)
    return out


def _has_kernel(x_SE: Tensor, weight_NFE: Tensor) -> bool:
    # Without a row there is nothing to launch, but the gradients still have to be zeros and not absent.
    if not x_SE.is_cuda or x_SE.dtype != torch.bfloat16 or not x_SE.size(0):
        return False
    aligned = all(size * x_SE.element_size() % _ALIGNMENT == 0 for size in weight_NFE.shape[1:])
    return aligned and torch.cuda.get_device_capability(x_SE.device) >= (8, 0)


class _GroupedLinear(torch.autograd.Function):
    """A product a group. Groups without a row have a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x_SE: Tensor, weight_NFE: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x_SE, weight_NFE)
        ctx.ends = ends
        # Each product a tensor of its own: selective checkpointing may keep them.
        pairs = zip(_slices(ends), weight_NFE, strict=True)
        return torch.cat([torch.mm(x_SE[rows], weight_FE.t()) for rows, weight_FE in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SE, weight_NFE = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_SF = grad_SF.contiguous()
        grad_x = torch.empty_like(x_SE) if wants_x else None
        grad_weight = torch.empty_like(weight_NFE) if wants_weight else None
        for n, rows in enumerate(_slices(ctx.ends)):
            if grad_x is not None:
                torch.mm(grad_SF[rows], weight_NFE[n], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad_SF[rows].t(), x_SE[rows], out=grad_weight[n])
        return grad_x, grad_weight, None


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *ends])]
