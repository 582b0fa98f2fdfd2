"""Buffers of a model: what belongs to its weights, and what is computed anew."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the weights, by name, such as a load-balance bias.

    Buffers that a model can compute again (tables) are registered with `persistent=False`.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def reset_buffers(model: nn.Module) -> None:
    """Fill all buffers anew after `to_empty`, by each module's `reset_buffers` where it has one."""
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
