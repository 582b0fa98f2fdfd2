"""The base model of a Tinker server: its folder, tokenizer and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rl.config.configurable import Configurable
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec, model_spec, spec_from_hf
from rl.starting_point import given_folder, random_model
from rl.tinker.types import BaseModel
from rl.training.config import TrainingConfig
from rl.training.policy import num_positions


class Base(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str
        """Name that clients ask for, such as "tiny", "Qwen/Qwen3-0.6B" or the path of the tokenizer."""
        folder: str | None = None
        """Hugging Face folder with its tokenizer; None draws a model of `flavor` from `seed`, with a byte
        tokenizer."""
        flavor: str = "tiny"
        """Size of a drawn model; without effect with a folder."""
        seed: int = 0
        """Seed of a drawn model."""
        batch_invariant: bool = False
        """Use kernels whose results do not depend on the rest of the batch, so that a sampler's logprobs have the
        bits that training computes for the same weights (docs/parallelism.md)."""
        max_lora_rank: int = 128

        def __post_init__(self) -> None:
            if not self.name.isprintable() or self.name.strip() != self.name or not self.name:
                raise ValueError(f"name={self.name!r}: must be printable, not empty and without outer spaces")
            if self.max_lora_rank < 1:
                raise ValueError(f"max_lora_rank={self.max_lora_rank}: must be at least 1")

    def __init__(
        self, *, config: Config, training: TrainingConfig, cache: str | Path, context: int | None = None
    ) -> None:
        """Open the model; a drawn one is written into `cache` first.

        Args:
            context: most tokens of a prompt with its completion; None: the model's positions.

        Raises:
            ValueError: the folder is incomplete or of an unsupported architecture, or a micro-batch cannot hold
                the context.
        """
        if config.folder is None:
            spec = replace(model_spec("qwen3", config.flavor), batch_invariant=config.batch_invariant)
            start = random_model(Path(cache).expanduser().absolute(), spec=spec, seed=config.seed)
        else:
            spec = spec_from_hf(HFFolder(Path(config.folder).expanduser()).config)
            if spec.model.has_experts:
                raise ValueError(f"folder={config.folder!r}: must be a dense model, not a mixture of experts")
            spec = replace(spec, batch_invariant=config.batch_invariant)
            start = given_folder(config.folder, spec=spec, any_size=True)
        start.make()
        self.folder = start.folder.expanduser().absolute()
        self.spec: ModelSpec = start.spec
        _, stop_token_ids = start.tokenizer()
        context = num_positions(self.spec) if context is None else context
        _check_room(config.name, context, training)
        self.model = BaseModel(
            name=config.name,
            architecture=self.spec.name,
            max_context_length=context,
            vocab_size=self.spec.model.vocab_size,
            tokenizer_folder=str(self.folder),
            stop_token_ids=tuple(stop_token_ids),
            tie_embeddings=self.spec.model.tie_embeddings,
            max_lora_rank=config.max_lora_rank,
        )


def _check_room(name: str, context: int, training: TrainingConfig) -> None:
    longest = training.max_sequence_length
    if longest is not None and longest != context:
        raise ValueError(f"training.max_sequence_length={longest}: must be None, base {name!r} sets it")
    if training.max_tokens_per_microbatch < context - 1:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch}: must be at least "
            f"{context - 1}, so that a sequence as long as the context of base {name!r} fits"
        )
