"""Model families: their registry, and the spec of one model, which the rest of the code works with.

All families are made of `Decoder` or subclasses of it; the parallel plans, the memory estimate and
the adapter of its tensors are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder

FAMILIES: dict[str, type[DecoderAdapter] | str] = {
    "gemma3_text": "rl.models.gemma3_text:Gemma3TextAdapter",
    "llama": "rl.models.llama:LlamaAdapter",
    "mistral": "rl.models.mistral:MistralAdapter",
    "qwen2": "rl.models.qwen2:Qwen2Adapter",
    "qwen3": "rl.models.qwen3:Qwen3Adapter",
    "qwen3_moe": "rl.models.qwen3_moe:Qwen3MoeAdapter",
}
"""Adapter of each `model_type` of Hugging Face; `register_family` adds to them.

Texts are places, imported when a family is first used.
"""

AdapterT = TypeVar("AdapterT", bound=type[DecoderAdapter])


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One flavor of one family. The loss is not part of it: the trainer's config chooses a loss.

    Example:
        >>> spec = model_spec("qwen3", "tiny")
        >>> spec.name, spec.flavor, spec.model.dim
        ('qwen3', 'tiny', 128)
        >>> module = spec.model.build()  # a Decoder with uninitialized weights
    """

    flavor: str
    """Size within the family, or the name of the folder that it came from."""
    model: Decoder.Config
    """Nested config of the model; `model.build()` makes the module."""
    adapter: type[DecoderAdapter]
    """Translation to and from Hugging Face's `config.json` and tensors."""
    batch_invariant: bool = False
    """Use kernels for which a token's bits do not depend on the rest of the batch, the same in
    trainer and generator (docs/training.md)."""
    float32_head: bool = False
    """Compute logits in float32, in trainer and generator, whatever the dtype of the other
    products.
    """

    @property
    def name(self) -> str:
        """Name of the family."""
        return self.adapter.model_type


def register_family(adapter: AdapterT) -> AdapterT:
    """Make a class the adapter of its `model_type`; a decorator.

    The module of the class has a `model_registry` of flavors. A process that gets a `ModelSpec`
    imports the adapter's module, which therefore must not be `__main__`.
    """
    FAMILIES[adapter.model_type] = adapter
    return adapter


def find_adapter(model_type: str) -> type[DecoderAdapter]:
    """Return the adapter of a family; raise ValueError if it is unknown."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: must be one of {', '.join(FAMILIES)}; "
            "docs/models.md says how to add a family"
        )
    entry = FAMILIES[model_type]
    if not isinstance(entry, str):
        return entry
    # Imported late: the families import this module.
    module, _, name = entry.partition(":")
    adapter: type[DecoderAdapter] = getattr(import_module(module), name)
    return adapter


def model_spec(family: str, flavor: str) -> ModelSpec:
    """Return the spec of a family's flavor; raise ValueError if either is unknown.

    Example:
        >>> model_spec("llama", "SmolLM2-135M").model.num_layers
        30
    """
    spec: ModelSpec = import_module(find_adapter(family).__module__).model_registry(flavor)
    return spec


def spec_from_hf(
    config: Mapping[str, Any],
    *,
    flavor: str | None = None,
    adapter: type[DecoderAdapter] | None = None,
) -> ModelSpec:
    """Return the spec of the model that a Hugging Face `config.json` describes.

    Raises ValueError for a model that is not supported.

    Args:
        flavor: name of the spec; None takes the `model_type`.
        adapter: reader of the config; None takes the adapter of its `model_type`.

    Example:
        >>> config = json.loads(Path("SmolLM2-135M/config.json").read_text())
        >>> spec_from_hf(config).model.dim
        576
    """
    # Named apart, because the folder of the text model alone is often what the user wants.
    model_type = str(config.get("model_type"))
    if model_type == "gemma3":
        raise ValueError(
            "config.json: model_type='gemma3' is a model of texts and images, which is not "
            "supported: must be 'gemma3_text', a folder of the text model alone, such as "
            "google/gemma-3-1b-it"
        )
    adapter = adapter or find_adapter(model_type)
    return ModelSpec(
        flavor=flavor or model_type, model=adapter.config_from_hf(dict(config)), adapter=adapter
    )


def spec_of_flavor(
    flavor: str, flavors: Mapping[str, Decoder.Config], *, adapter: type[DecoderAdapter]
) -> ModelSpec:
    """Return the spec of a flavor; raise ValueError, naming the existing ones, if it is unknown."""
    if flavor not in flavors:
        raise ValueError(
            f"{adapter.model_type} flavor {flavor!r} does not exist: must be one of "
            f"{', '.join(flavors)}"
        )
    return ModelSpec(flavor=flavor, model=flavors[flavor], adapter=adapter)
