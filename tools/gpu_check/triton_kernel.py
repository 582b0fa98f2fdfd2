"""The smallest Triton kernel. It has a file of its own, since Triton has no build for machines
without GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _double(x: tl.tensor, out: tl.tensor, num: int, block: tl.constexpr) -> None:
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + places, 2 * tl.load(x + places, mask=places < num), mask=places < num)


def doubled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK)
    return out
