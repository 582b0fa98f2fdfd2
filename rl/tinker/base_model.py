"""The base model of a server: its folder and layout, and the adapters that clients train on it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tinker import types as wire

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.mesh import ParallelismConfig
from rl.models.converter import ModelConverters
from rl.models.files.assets import resolve_assets
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec, model_spec
from rl.starting_point import describe_random_model, open_model_folder
from rl.tinker.types import MAX_SEQ_ID, BaseModelInfo, InvalidRequestError, check_range
from rl.training.config import TrainingConfig

ALPHA = 32.0
"""Numerator of the products' scale, as in the official service: one learning rate fits all ranks.
"""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class BaseModelFolder(Configurable):
    """Folder and layout of the base model that a backend offers; `info` is for the clients."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Source of the model, its name, and the adapters that clients may ask for."""

        name: str | None = None
        """Name that clients ask for and open the tokenizer by, such as "Qwen/Qwen3-0.6B"; None: the
        path of its folder, which needs no hub."""
        aliases: tuple[str, ...] = ()
        """Further names that clients may ask for the model by, such as those in copied scripts.
        Scripts that open a tokenizer by such a name need one with the same tokens."""
        folder: str | None = None
        """Hugging Face folder with its tokenizer, GGUF file, package or name on the hub, as
        `hf_assets_path` of a run; None draws a model of `flavor` from `seed`, with a byte
        tokenizer."""
        hf_revision: str | None = None
        """Branch, tag or commit of a model on the hub; None takes its main branch."""
        flavor: str = "tiny"
        """Size of a drawn model; without effect with a folder."""
        seed: int = 0
        """Seed of a drawn model."""
        batch_invariant: bool = False
        """Use kernels whose results do not depend on the rest of the batch, so that a sampler's
        logprobs have the bits that training computes for the same weights (docs/training.md)."""
        float32_head: bool = False
        """Compute logits in float32 whatever the dtype of the other products."""
        min_lora_rank: int = 0
        """Lowest rank that clients may ask for; 0 lets them train all parameters, with whole copies
        of the model.
        """
        max_lora_rank: int = 128

        def __post_init__(self) -> None:
            check_bounds(self, "min_lora_rank", at_least=0)
            check_bounds(self, "max_lora_rank", at_least=max(1, self.min_lora_rank))

    def __init__(
        self,
        *,
        config: Config,
        training: TrainingConfig,
        cache: str | Path,
        context: int | None = None,
    ) -> None:
        """Open the model; a drawn one is written into `cache` first.

        Args:
            context: most tokens of a prompt with its completion; None: the model's positions.

        Raises:
            ValueError: the folder is incomplete or of an unsupported architecture, or a micro-batch
                cannot hold the context.
        """
        # A drawn model is written to a folder like any other: training and samplers read it there.
        cache = Path(cache).expanduser().absolute()
        if config.folder is None:
            spec = replace(
                model_spec("qwen3", config.flavor), batch_invariant=config.batch_invariant
            )
            start = describe_random_model(cache, spec=spec, seed=config.seed)
        else:
            folder = resolve_assets(config.folder, cache=cache, revision=config.hf_revision)
            start = open_model_folder(folder, spec=None, batch_invariant=config.batch_invariant)
            if start.spec.model.has_experts:
                raise ValueError(
                    f"folder={config.folder!r}: must be a dense model, not a mixture of experts"
                )
        start.make()
        self.folder = start.folder.expanduser().absolute()
        self.spec: ModelSpec = replace(start.spec, float32_head=config.float32_head)
        _, stop_token_ids = start.tokenizer()
        context = self.spec.model.rope.max_positions if context is None else context
        name = config.name or str(self.folder)
        _check_room(name, context, training)
        # A head that is tied to the embedding has no adapter of its own.
        has_head = not self.spec.model.tie_embeddings
        self.info = BaseModelInfo(
            name=name,
            aliases=config.aliases,
            architecture=self.spec.name,
            max_context_length=context,
            vocab_size=self.spec.model.vocab_size,
            tokenizer_folder=str(self.folder),
            stop_token_ids=tuple(stop_token_ids),
            tie_embeddings=self.spec.model.tie_embeddings,
            min_lora_rank=config.min_lora_rank,
            max_lora_rank=config.max_lora_rank,
            num_parameters=_count_trained(self.spec, None),
            num_parameters_per_rank=_count_trained(
                self.spec, LoRA.Config(rank=1, unembedding=has_head)
            ),
        )


def _count_trained(spec: ModelSpec, lora: LoRA.Config | None) -> int:
    """Return the number of parameters that a model trains."""
    converters = () if lora is None else (lora,)
    # On the meta device, which has shapes without memory.
    with torch.device("meta"):
        model = spec.model.build()
        ModelConverters(
            converters,
            spec=spec,
            degrees=ParallelismConfig().resolve_degrees(1),
            device=torch.device("meta"),
        ).convert(model)
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def _check_room(name: str, context: int, training: TrainingConfig) -> None:
    longest = training.max_sequence_length
    if longest is not None and longest != context:
        raise ValueError(
            f"training.max_sequence_length={longest}: must be None, base {name!r} sets it"
        )
    if training.max_tokens_per_microbatch < context - 1:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch}: must be at "
            f"least {context - 1}, so that a sequence as long as the context of base {name!r} fits"
        )


def make_lora_config(lora: wire.LoraConfig, base: BaseModelInfo) -> LoRA.Config:
    """Return the adapters of a model; raise InvalidRequestError if they cannot be created."""
    or_all = "" if base.min_lora_rank else ", unless it is 0 to train all parameters"
    check_range(
        f"lora_config.rank{or_all}", lora.rank, max(1, base.min_lora_rank), base.max_lora_rank
    )
    check_range("lora_config.seed", lora.seed, 0, MAX_SEQ_ID)
    targets = (*(ATTENTION if lora.train_attn else ()), *(FEED_FORWARD if lora.train_mlp else ()))
    unembedding = lora.train_unembed and not base.tie_embeddings
    if not (targets or unembedding):
        raise InvalidRequestError(
            f"lora_config: train_attn=False, train_mlp=False, train_unembed={lora.train_unembed}: "
            "nothing would have an adapter; a head that is tied to the embedding never has one"
        )
    # Drawn here, so that it is the same on all ranks.
    seed = secrets.randbits(62) if lora.seed is None else lora.seed
    return LoRA.Config(
        rank=lora.rank, alpha=ALPHA, target_modules=targets, unembedding=unembedding, seed=seed
    )
