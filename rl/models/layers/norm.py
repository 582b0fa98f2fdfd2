"""RMS norms whose backward on a CPU keeps the input alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMS norm, with a faster backward on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        # The backward below is for plain tensors of one dtype. A compiler takes PyTorch's own norm,
        # which it can fuse.
        is_plain = (
            not isinstance(x, DTensor)
            and x.dtype == weight.dtype
            and not torch.compiler.is_compiling()
        )
        if is_plain and x.device.type == "cpu" and x.requires_grad and torch.is_grad_enabled():
            out: Tensor = _RMSNorm.apply(x, weight, self.eps)
            return out
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """RMS norm of [..., E] that keeps its input alone for the backward.

    Autograd would keep two tensors in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In float32 at least, and rounded once at the end: every rounded product in between would
        # add an error.
        stored = grads[0].dtype
        wide = torch.promote_types(stored, torch.float32)
        x, weight = ctx.saved_tensors  # Checkpoints allow to read them once.
        x, weight, grad_out = x.to(wide), weight.to(wide), grads[0].to(wide)
        x_NE, grad_NE = x.flatten(0, -2), grad_out.flatten(0, -2)
        norm_N1 = torch.linalg.vector_norm(x_NE, dim=-1, keepdim=True)
        scale_N1 = (norm_N1.square() / len(weight) + ctx.eps).rsqrt()
        # With y = x * scale: dx = scale * (g w - y * mean(g w y)), and dw is the sum of g y.
        product_NE = grad_NE * x_NE
        pull_N1 = product_NE.mv(weight)[:, None] * scale_N1**3 / len(weight)
        grad = (grad_NE * weight).mul_(scale_N1).addcmul_(x_NE, pull_N1, value=-1)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product_NE.mT.mv(scale_N1[:, 0]).to(stored)
        return grad.view_as(x).to(stored), grad_weight, None


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm with weights kept as distances from 1, computed in float32."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)
