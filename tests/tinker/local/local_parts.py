"""A small base model, models in training on it and calls, which the tests of the local backend share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.tinker.local.base import Base
from rl.tinker.local.models import LocalModel
from rl.tinker.messages import (
    AdamParams,
    Datum,
    LoRASettings,
    LossCall,
    ModelSettings,
    SampleRequest,
    Sampling,
)
from rl.training.config import TrainingConfig
from tests.training.parts import write_assets

NAME = "small"
TRAINING = TrainingConfig(max_tokens_per_microbatch=128)
CROSS_ENTROPY = LossCall(name="cross_entropy")
CPU = torch.device("cpu")


def base_config(folder: Path, *, tie: bool = True, batch_invariant: bool = False) -> Base.Config:
    """A model of width 36 with a context of 64 and 320 tokens of vocabulary; written unless it is there."""
    if not folder.exists():
        write_assets(folder, tie=tie)
    return Base.Config(name=NAME, folder=str(folder), batch_invariant=batch_invariant)


def open_base(folder: Path, **options: Any) -> Base:
    base: Base = base_config(folder, **options).build(training=TRAINING, cache="unused", device=CPU)
    return base


def settings(rank: int = 4, **lora: Any) -> ModelSettings:
    """`rank` 0 trains all parameters."""
    adapters = LoRASettings(rank=rank, **({"seed": 5} | lora)) if rank else None
    return ModelSettings(base_model=NAME, lora=adapters)


def make_model(base: Base, rank: int = 4, **lora: Any) -> LocalModel:
    return LocalModel(base, settings(rank, **lora), training=TRAINING)


def train(
    model: LocalModel, data: list[Datum], *, steps: int = 1, call: LossCall = CROSS_ENTROPY
) -> list[np.ndarray]:
    """The logprobs of all steps."""
    found: list[np.ndarray] = []
    for _ in range(steps):
        found += model.forward_backward(data, call, backward=True).logprobs
        model.optim_step(AdamParams(learning_rate=1e-2))
    return found


def weights(model: LocalModel) -> dict[str, torch.Tensor]:
    """A copy of what is trained."""
    return {name: tensor.clone() for name, tensor in model.snapshot().trained.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def request(
    prompt: list[int],
    *,
    num_samples: int = 1,
    topk: int = 0,
    prompt_logprobs: bool = False,
    **how: Any,
) -> SampleRequest:
    return SampleRequest(
        prompt=np.array(prompt, np.int32),
        num_samples=num_samples,
        sampling=Sampling(**({"max_tokens": 8, "seed": 3} | how)),
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk,
    )
