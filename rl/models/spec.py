"""What a trainer and a generator need to know of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from rl.config.configurable import Configurable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl.distributed.mesh import ParallelismConfig


class StateDictAdapter(Protocol):
    """Between our parameters and Hugging Face's tensors, one parameter at a time.

    One of ours is made of one or more of theirs (fused projections), so a large model is
    read and written as a stream of whole, unsharded CPU tensors.
    """

    def hf_names(self, name: str) -> list[str]:
        """Hugging Face tensors that our parameter `name` is made of, in order."""
        ...

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Our parameter `name` from the tensors of `hf_names(name)`."""
        ...

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Hugging Face tensors of our parameter `name`."""
        ...

    def hf_config(self) -> dict[str, Any]:
        """`config.json` of the Hugging Face folder."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One flavor of one family. The loss is not here: it belongs to the trainer's config."""

    name: str
    flavor: str
    model: Configurable.Config
    """The model's own nested config; `model.build()` makes the module."""
    parallelize: Callable[..., nn.Module]
    """`parallelize(model, *, mesh, config)`: the trainer's plan (FSDP, TP, DDP), in place."""
    check_layout: Callable[[Any, ParallelismConfig], None]
    """`check_layout(model config, parallelism)`: raises ValueError for degrees that do not fit the model."""
    parallelize_generator: Callable[[nn.Module, DeviceMesh], nn.Module]
    """The generator's plan: tensor parallel only, any token count, in place."""
    adapter: Callable[[Any], StateDictAdapter]
    """Of the model config."""
    from_hf_config: Callable[[dict[str, Any]], Configurable.Config]
    """Model config of a Hugging Face `config.json`; raises ValueError for what is not supported."""
    batch_invariant: bool = False
    """Kernels with which a token's bits depend on nothing that is computed beside it, the same ones in the
    trainer and in the generator (docs/batch_invariance.md)."""
