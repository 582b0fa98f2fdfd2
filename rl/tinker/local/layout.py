"""How models in training are laid out over processes, and what of them is the same memory.

Every rank makes the same models and calls the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.distributed.process_group import World
from rl.distributed.shards import local_tensor, whole_tensor
from rl.training.engine import TrainingEngine
from rl.training.place import Place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """One rank's, of all models on one base."""

    config: TrainingEngine.Config
    """Of every engine; its `training` and `converters` are the model's."""
    world: World
    place: Place
    """Which its owner leaves when all models are closed."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """By our names, this rank's shards of what LoRA models do not train: those of the first one made."""


def share_frozen(parameters: Mapping[str, nn.Parameter], frozen: dict[str, Tensor]) -> None:
    """Let what is not trained have the memory of `frozen`; what that lacks becomes part of it.

    Before the first forward: then FSDP2 looks where its shards are. One that it fills up to be as long as
    the others' stays a copy.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            continue
        kept = frozen.setdefault(name, local_tensor(parameter).detach())
        if isinstance(parameter, DTensor):
            parameter._local_tensor = kept
        else:
            parameter.data = kept


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """All of each tensor, in the host's memory; every rank takes part, those that do not `keep` get none."""
    found = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor)
        if keep:
            found[name] = whole.detach().cpu()
    return found
