"""Buffers of a model.

Every module of ours that has some fills them in `reset_buffers()`; modules of others inside the
model, such as a generator's attention with its scales, have buffers that are no business of ours.
"""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Those that are saved and sent along with the parameters, by name; never cast, never sharded."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if hasattr(owner, "reset_buffers") and name not in owner._non_persistent_buffers_set
    }


def reset_buffers(module: nn.Module) -> None:
    """Fill all buffers anew, after `to_empty` has moved the module off the meta device."""
    for part in module.modules():
        reset = getattr(part, "reset_buffers", None)
        if reset is not None:
            reset()
