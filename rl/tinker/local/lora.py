"""What a model's settings are in the engine: its converters, and the module that samplers run.

The products are scaled by alpha / rank with alpha 32, as PEFT and the official service do it, so that one
learning rate does for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from rl.distributed.mesh import ParallelismConfig
from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.batch_invariant.probe import MAX_PRODUCTS, check_rows, linear, row_counts
from rl.models.batch_invariant.rows import ROW_MULTIPLE
from rl.models.buffers import reset_buffers
from rl.models.converters.converter import ModelConverter, ModelConverters
from rl.models.converters.lora import HEAD, LoRA
from rl.models.converters.low_rank import adapted_layers
from rl.models.spec import ModelSpec
from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import LoRASettings

ALPHA = 32.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
MAX_SEED = 2**63 - 1


class InvariantKernels(ModelConverter):
    """The batch-invariant mode of a model with adapters.

    A trainer refuses the two together, because its generator has the sums W + s B A, whose products round
    differently. Here samplers run the adapters unmerged too, so that both compute the same bits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        pass

    token_multiple = ROW_MULTIPLE

    def convert(self, model: nn.Module) -> None:
        make_batch_invariant(model, spec=replace(self.spec, batch_invariant=True), device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """How one base model is built for given settings; engine and samplers alike."""

    spec: ModelSpec
    converters: tuple[ModelConverter.Config, ...]

    @classmethod
    def of(cls, spec: ModelSpec, lora: LoRASettings | None, *, seed: int = 0) -> ModelPlan:
        """`seed` is of the adapters' first values."""
        if lora is None:
            return cls(spec=spec, converters=())
        targets = (*(ATTENTION if lora.train_attn else ()), *(FEED_FORWARD if lora.train_mlp else ()))
        adapters = LoRA.Config(
            rank=lora.rank,
            alpha=ALPHA,
            target_modules=targets,
            unembedding=adapts_head(spec, lora),
            seed=seed,
        )
        kernels = (InvariantKernels.Config(),) if spec.batch_invariant else ()
        return cls(spec=replace(spec, batch_invariant=False), converters=(adapters, *kernels))

    def module(self, *, device: torch.device) -> nn.Module:
        """Without parameters: those are on the meta device, to be put in by `put_tensors`."""
        with torch.device("meta"):
            model: nn.Module = self.spec.model.build()
            make_batch_invariant(model, spec=self.spec, device=device)
            degrees = ParallelismConfig().degrees(1)
            ModelConverters(self.converters, spec=self.spec, degrees=degrees, device=device).convert(model)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
        reset_buffers(model)
        return model.requires_grad_(False)


def adapts_head(spec: ModelSpec, lora: LoRASettings) -> bool:
    """Whether the output head gets an adapter: one that is the embedding's weight has none."""
    return lora.train_unembed and not spec.model.tie_embeddings  # type: ignore[attr-defined]


def put_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the parameters be these tensors themselves, frozen."""
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))


def check_lora(lora: LoRASettings, *, spec: ModelSpec, max_rank: int) -> None:
    """Raise InvalidRequestError naming the field of `lora_config` that cannot be."""
    if not 1 <= lora.rank <= max_rank:
        raise InvalidRequestError(
            f"lora_config.rank={lora.rank}: must be 1 to {max_rank}, or 0 to train all parameters"
        )
    if lora.seed is not None and not 0 <= lora.seed <= MAX_SEED:
        raise InvalidRequestError(f"lora_config.seed={lora.seed}: must be 0 to {MAX_SEED}, or none")
    if not (lora.train_attn or lora.train_mlp or adapts_head(spec, lora)):
        why = " (this model's output head is its embedding, which has none)" if lora.train_unembed else ""
        raise InvalidRequestError(
            f"lora_config: train_attn=False, train_mlp=False, train_unembed={lora.train_unembed}: nothing "
            f"would have an adapter{why}: one of the first two must be true"
        )


def check_products(module: nn.Module, *, dtype: torch.dtype, max_rows: int) -> None:
    """Try the products of a model's adapters at different numbers of tokens, as `probe.check_machine` does
    the model's own.

    Raises:
        ValueError: the first whose rows depend on their number on this machine.
    """
    shapes = {
        shape
        for base, adapter in adapted_layers(module)
        if base is not getattr(module, HEAD, None)  # its adapter is added to its weight
        for shape in ((base.in_features, adapter.lora_a.size(0)), (adapter.lora_a.size(0), base.out_features))
    }
    for fan_in, fan_out in sorted(shapes):
        _check_product(fan_in, fan_out, dtype, max_rows)


@cache
def _check_product(fan_in: int, fan_out: int, dtype: torch.dtype, max_rows: int) -> None:
    """Once for all models of a size and rank."""
    most = max(ROW_MULTIPLE, MAX_PRODUCTS / (fan_in * fan_out))
    check_rows(
        f"an adapter's product {fan_in} -> {fan_out}",
        linear(fan_in, fan_out, dtype=dtype),
        width=fan_in,
        dtype=dtype,
        counts=[count for count in row_counts(max_rows) if count <= most],
    )


def same_shape(one: LoRASettings | None, other: LoRASettings | None, *, spec: ModelSpec) -> bool:
    """Whether the weights of one fit the other; seeds do not matter."""
    return _shape(one, spec) == _shape(other, spec)


def _shape(lora: LoRASettings | None, spec: ModelSpec) -> Sequence[object] | None:
    return None if lora is None else (lora.rank, lora.train_attn, lora.train_mlp, adapts_head(spec, lora))
