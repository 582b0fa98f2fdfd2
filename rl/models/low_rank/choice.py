"""Choice of a sampler's bank of adapters by its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl.models.low_rank.types import Bank


def make_bank(
    layers: Mapping[str, nn.Module],
    *,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None,
    device: torch.device,
) -> Bank:
    """Return a bank of adapters beside these layers; see `AttachedBank`."""
    # Imported here, because only adapters on a CPU need numba.
    if device.type == "cpu":
        from rl.models.low_rank.bank import AdapterBank

        return AdapterBank(layers, dtype=dtype, head_dtype=head_dtype)
    from rl.models.low_rank.plain_bank import PlainBank

    return PlainBank(layers, dtype=dtype, head_dtype=head_dtype)
