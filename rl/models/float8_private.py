"""Private names of torchao that float8 needs."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor


def multiply_groups_by_torchao(x_SE: Tensor, weight_NEF: Tensor, ends_N: Tensor) -> Tensor:
    """Multiply the rows of each group with the group's weight in float8, in bfloat16 [S, F].

    torchao 0.18 exports the product under this private name alone. Its own padding of the groups is
    off, because the caller has padded them. `ends_N` is int32.
    """
    product = import_module("torchao.prototype.moe_training")._to_fp8_rowwise_then_scaled_grouped_mm
    out_SF: Tensor = product(x_SE, weight_NEF, ends_N, pad_token_groups_for_grouped_mm=False)
    return out_SF
