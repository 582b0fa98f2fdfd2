"""Buffers that belong to a model's state."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Those that are saved and sent along with the parameters, by name; never cast, never sharded."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def reset_buffers(module: nn.Module) -> None:
    """Fill all buffers anew, after `to_empty` has moved the module off the meta device."""
    for part in module.modules():
        reset = getattr(part, "reset_buffers", None)
        if reset is not None:
            reset()
