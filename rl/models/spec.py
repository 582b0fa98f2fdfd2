"""Everything that the rest of the code needs to know of a model family, and the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from rl.models.decoder import Decoder
from rl.models.model_cost import BlockMemory, ModelWork, block_memory, model_work
from rl.models.parallelize import check_decoder_layout, parallelize_decoder
from rl.models.parallelize_generator import is_split, parallelize_decoder_generator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl.distributed.mesh import ParallelismConfig

FAMILIES = ("qwen3", "qwen3_moe")
"""Modules of `rl.models` that define a family each, named after Hugging Face's `model_type`."""


class StateDictAdapter(Protocol):
    """Translation between our parameters and Hugging Face's tensors, one parameter at a time.

    One of our parameters consists of one or more of their tensors (fused projections), so a large model is read
    and written as a stream of whole, unsharded CPU tensors.
    """

    def hf_names(self, name: str) -> list[str]:
        """Return the Hugging Face tensors that the parameter consists of, in order."""
        ...

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return the parameter made of the tensors of `hf_names(name)`."""
        ...

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of the parameter."""
        ...

    def hf_config(self) -> dict[str, Any]:
        """Return `config.json` of the Hugging Face folder."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One flavor of one family. The defaults serve every model made of `Decoder`.

    The loss is not part of it: the trainer's config chooses one.
    """

    name: str
    """Family, one of `FAMILIES`."""
    flavor: str
    """Size within the family, or the name of the folder that it came from."""
    model: Decoder.Config
    """Nested config of the model; `model.build()` makes the module."""
    adapter: Callable[[Decoder.Config], StateDictAdapter]
    """Constructor of the translation to and from Hugging Face's tensors."""
    from_hf_config: Callable[[dict[str, Any]], Decoder.Config]
    """Parser of a Hugging Face `config.json`; raises ValueError for unsupported settings."""
    parallelize: Callable[..., nn.Module] = parallelize_decoder
    """`parallelize(model, *, mesh, config)`: the trainer's plan (FSDP, TP, CP, EP), in place."""
    check_layout: Callable[[Decoder.Config, ParallelismConfig], None] = check_decoder_layout
    """Raises ValueError for parallel degrees that do not fit the model's sizes."""
    parallelize_generator: Callable[[Decoder, DeviceMesh], Decoder] = parallelize_decoder_generator
    """The generator's plan, in place: tensor parallel only, for any number of tokens."""
    is_split_in_generator: Callable[[str], bool] = is_split
    """Tells whether the generator's plan splits the parameter of a name."""
    work: Callable[..., ModelWork] = model_work
    """`work(model config, converted=None)`: parameters, FLOPs and bytes per token."""
    block_memory: Callable[..., BlockMemory] = block_memory
    """Activation memory of one block, see `rl.models.model_cost`."""
    batch_invariant: bool = False
    """Use kernels for which a token's bits do not depend on the rest of the batch, the same in trainer and
    generator (docs/parallelism.md)."""


def model_spec(family: str, flavor: str) -> ModelSpec:
    """Return the spec of a family's flavor; raise ValueError if either is unknown."""
    if family not in FAMILIES:
        raise ValueError(f"model family {family!r} does not exist: must be one of {', '.join(FAMILIES)}")
    spec: ModelSpec = import_module(f"rl.models.{family}").model_registry(flavor)
    return spec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model that a Hugging Face `config.json` describes.

    Raises:
        ValueError: if its `model_type` is no family, or the family does not support its settings.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not supported: must be one of {', '.join(FAMILIES)}"
        )
    family = import_module(f"rl.models.{model_type}")
    spec: ModelSpec = family.make_spec(flavor=model_type, model=family.config_from_hf(dict(config)))
    return spec


def choose_flavor(flavors: Mapping[str, Decoder.Config], flavor: str, *, family: str) -> Decoder.Config:
    """Return the config of a flavor; raise ValueError, naming the existing ones, if it is unknown."""
    if flavor not in flavors:
        raise ValueError(f"{family} flavor {flavor!r} does not exist: must be one of {', '.join(flavors)}")
    return flavors[flavor]
