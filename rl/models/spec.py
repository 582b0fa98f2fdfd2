"""Everything that the rest of the code needs to know of a model family, and the registry of families.

All families are made of `Decoder`; the parallel plans, the memory estimate and the adapter of its tensors are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder

FAMILIES = {
    "gemma3_text": "Gemma3TextAdapter",
    "llama": "LlamaAdapter",
    "mistral": "MistralAdapter",
    "qwen3": "Qwen3Adapter",
    "qwen3_moe": "Qwen3MoeAdapter",
}
"""Adapter in each module of `rl.models` that defines a family; the module has the name of Hugging Face's
`model_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One flavor of one family. The loss is not part of it: the trainer's config chooses one."""

    flavor: str
    """Size within the family, or the name of the folder that it came from."""
    model: Decoder.Config
    """Nested config of the model; `model.build()` makes the module."""
    adapter: type[DecoderAdapter]
    """Translation to and from Hugging Face's `config.json` and tensors."""
    batch_invariant: bool = False
    """Use kernels for which a token's bits do not depend on the rest of the batch, the same in trainer and
    generator (docs/training.md)."""

    @property
    def name(self) -> str:
        """Name of the family."""
        return self.adapter.model_type


def model_spec(family: str, flavor: str) -> ModelSpec:
    """Return the spec of a family's flavor; raise ValueError if either is unknown."""
    if family not in FAMILIES:
        raise ValueError(f"model family {family!r} does not exist: must be one of {', '.join(FAMILIES)}")
    spec: ModelSpec = import_module(f"rl.models.{family}").model_registry(flavor)
    return spec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model that a Hugging Face `config.json` describes; raise ValueError if unsupported."""
    model_type = config.get("model_type")
    if model_type == "gemma3":
        raise ValueError(
            "config.json: model_type='gemma3' is a model of texts and images, which is not supported: must be "
            "'gemma3_text', a folder of the text model alone, such as google/gemma-3-1b-it"
        )
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not supported: must be one of {', '.join(FAMILIES)}"
        )
    adapter = getattr(import_module(f"rl.models.{model_type}"), FAMILIES[model_type])
    return ModelSpec(flavor=model_type, model=adapter.config_from_hf(dict(config)), adapter=adapter)


def spec_of_flavor(
    flavor: str, flavors: Mapping[str, Decoder.Config], *, adapter: type[DecoderAdapter]
) -> ModelSpec:
    """Return the spec of a flavor; raise ValueError, naming the existing ones, if it is unknown."""
    if flavor not in flavors:
        raise ValueError(
            f"{adapter.model_type} flavor {flavor!r} does not exist: must be one of {', '.join(flavors)}"
        )
    return ModelSpec(flavor=flavor, model=flavors[flavor], adapter=adapter)
