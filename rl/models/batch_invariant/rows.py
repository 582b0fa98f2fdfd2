"""Whole tiles of rows: what linear layers need, so that a row's bits depend on no other.

Matrix products of a few rows take other kernels than large ones, which sum in another order. At
a multiple of `ROW_MULTIPLE` rows each row has the same bits, whatever the number; `probe.py`
asks the machine.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 32
"""Tokens go through the model in multiples of it, on both sides."""


def pad_rows(x: Tensor) -> Tensor:
    """[T, ...] -> [multiple of ROW_MULTIPLE, ...], zeros at the end."""
    padding = -x.size(0) % ROW_MULTIPLE
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, padding)) if padding else x
