"""The base models of the local backend: one frozen copy each, which its LoRA models and samplers share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rl.config.configurable import Configurable
from rl.models.hf import HFFolder, read_parameters
from rl.models.qwen3.model import Qwen3
from rl.models.qwen3.registry import model_registry
from rl.models.spec import ModelSpec
from rl.starting_point import given_folder, random_model
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.data import DataRules
from rl.tinker.local.lora import ModelPlan, check_lora, put_tensors
from rl.tinker.messages import BaseModel, LoRASettings, ModelSettings
from rl.training.config import TrainingConfig
from rl.training.policy import num_positions

_SAMPLED_BYTES = 1 << 20


class Base(Configurable):
    """One base model: its weights, tokenizer and sizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str
        """What callers name it, such as "tiny", "Qwen/Qwen3-0.6B" or the path of its tokenizer."""
        folder: str | None = None
        """Hugging Face folder of a dense Qwen3 with its tokenizer; None draws a model of `flavor` from
        `seed`, with a tokenizer of bytes."""
        flavor: str = "tiny"
        """Size of the model that is drawn; without effect with a folder."""
        seed: int = 0
        """Of the weights that are drawn."""
        batch_invariant: bool = False
        """Kernels whose results depend on nothing computed beside a token, so that a sampler's logprobs are
        the bits that training computes for the same weights (docs/batch_invariance.md)."""
        trainable: bool = True
        """Whether models may be trained that start from it."""

        def __post_init__(self) -> None:
            if not self.name.isprintable() or self.name.strip() != self.name or not self.name:
                raise ValueError(f"name={self.name!r}: must be printable, not empty and without outer spaces")

    def __init__(
        self,
        *,
        config: Config,
        training: TrainingConfig,
        cache: str | Path,
        device: torch.device,
        context: int | None = None,
    ) -> None:
        """The weights are read when they are first asked for.

        Args:
            training: in which dtypes weights are kept and used.
            cache: folder of the models that are drawn.
            context: most tokens of a prompt with its completion; None: what the model has positions for.

        Raises:
            ValueError: a folder that is incomplete or no dense Qwen3, or a context longer than a micro-batch.
        """
        self.config = config
        self.device = device
        spec = replace(model_registry(config.flavor), batch_invariant=config.batch_invariant)
        if config.folder is None:
            start = random_model(Path(cache).expanduser().absolute(), spec=spec, seed=config.seed)
        else:
            start = given_folder(config.folder, spec=spec, any_size=True)
        start.make()
        self.folder = start.folder.expanduser().absolute()
        self.spec: ModelSpec = start.spec
        self.tokenizer, self.stop_token_ids = start.tokenizer()
        self.context: int = num_positions(self.spec) if context is None else context
        """Most tokens of a prompt with its completion."""
        _check_room(config.name, self.context, training)
        self.fingerprint = _fingerprint(HFFolder(self.folder))
        """Of the weights, so that what was saved with others is found out."""
        self.dtype: torch.dtype = getattr(torch, training.dtype)
        """That weights are kept in."""
        self.serve_dtype: torch.dtype = getattr(torch, training.param_dtype)
        """Of forwards."""

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """By our names: the one copy that LoRA models on it have in common."""
        return _read(HFFolder(self.folder), self.spec, device=self.device, dtype=self.dtype)

    @cached_property
    def _served(self) -> dict[str, Tensor]:
        """The same tensors, unless forwards have another dtype."""
        return {name: tensor.to(self.serve_dtype) for name, tensor in self.weights.items()}

    def load(self) -> None:
        """Read the weights now."""
        _ = self._served

    @property
    def vocab_size(self) -> int:
        return self.spec.model.vocab_size  # type: ignore[attr-defined]

    @property
    def data_rules(self) -> DataRules:
        return DataRules(vocab_size=self.vocab_size, max_tokens=self.context - 1)

    def check_settings(self, settings: ModelSettings, *, max_lora_rank: int) -> None:
        """Raise InvalidRequestError for a model that could not be created on it."""
        if not self.config.trainable:
            raise InvalidRequestError(f"base_model={settings.base_model!r}: can only be sampled from")
        if settings.lora is not None:
            check_lora(settings.lora, spec=self.spec, max_rank=max_lora_rank)

    def describe(self) -> BaseModel:
        return BaseModel(
            name=self.config.name,
            architecture=self.spec.name,
            max_context_length=self.context,
            tokenizer_folder=str(self.folder),
            trainable=self.config.trainable,
        )

    def module(self, lora: LoRASettings | None, trained: Mapping[str, Tensor]) -> Qwen3:
        """The model to sample from, made of the base's tensors and of `trained` ones, none of them copied.

        LoRA's products stay unmerged, as in training, so that both compute alike.
        """
        module = ModelPlan.of(self.spec, lora).module(device=self.device)
        assert isinstance(module, Qwen3)
        tensors = self._served | dict(trained)
        assert tensors.keys() == dict(module.named_parameters()).keys(), "weights of other settings"
        put_tensors(module, tensors)
        return module


def _check_room(name: str, context: int, training: TrainingConfig) -> None:
    longest = training.max_sequence_length
    if longest is not None and longest != context:
        raise ValueError(f"training.max_sequence_length={longest}: must be None: base {name!r} says it")
    if training.max_tokens_per_microbatch < context - 1:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch}: must be at least "
            f"{context - 1}, so that a sequence as long as the context of base {name!r} fits"
        )


def _read(
    folder: HFFolder, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    with torch.device("meta"):
        names = [name for name, _ in spec.model.build().named_parameters()]
    tensors = read_parameters(folder, spec.adapter(spec.model), names)
    return {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}


def _fingerprint(folder: HFFolder) -> str:
    """Of sizes, headers and the ends of the weights files: enough to tell models apart, and quick."""
    digest = hashlib.sha256(json.dumps(folder.config, sort_keys=True).encode())
    for file in sorted(set(folder.files.values())):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()
