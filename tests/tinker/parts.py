"""A small base model, models trained on it, data and calls for the tests of the backends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tinker import AdamParams, LoraConfig

from rl.models.spec import ModelSpec
from rl.tinker.backend import TinkerBackend
from rl.tinker.base_model import BaseModelFolder, make_lora_config
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.types import Datum, ModelSettings, SampleOutput, SampleRequest
from rl.tinker.wire.codec import check_sample
from rl.tinker.wire.datums import (
    WireLoss,
    check_optim_params,
    collect_metrics,
    find_loss,
    make_samples,
)
from rl.training.config import TrainingConfig
from tests.support.fake_tinker import prompt
from tests.training.parts import write_assets

NAME, CONTEXT, VOCAB = "small", 64, 320
TRAINING = TrainingConfig(max_tokens_per_microbatch=128)
CROSS_ENTROPY, PPO = find_loss("cross_entropy"), find_loss("ppo")


class Output(NamedTuple):
    """Result of a `forward_backward`, by datum."""

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]


def base_config(
    folder: Path,
    *,
    name: str | None = NAME,
    tie: bool = True,
    spec: ModelSpec | None = None,
    batch_invariant: bool = False,
) -> BaseModelFolder.Config:
    if not folder.exists():
        write_assets(folder, tie=tie, spec=spec)
    return BaseModelFolder.Config(name=name, folder=str(folder), batch_invariant=batch_invariant)


def local_backend(folder: Path, **options: Any) -> LocalTinkerBackend:
    config = LocalTinkerBackend.Config(
        base=base_config(folder, **options), training=TRAINING, device="cpu"
    )
    return LocalTinkerBackend(config=config)


def settings(rank: int = 4, **lora: Any) -> ModelSettings:
    """Return adapter settings, or for rank 0 those of a model with all parameters trained."""
    adapters = LoraConfig(rank=rank, **({"seed": 5} | lora)) if rank else None
    return ModelSettings(base_model=NAME, lora=adapters)


# Data


def datum(tokens: list[int], targets: Any = None, **inputs: Any) -> Datum:
    """Return a datum whose targets default to the next tokens, with 7 at the end."""
    found = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    targets = np.array([*tokens[1:], 7] if targets is None else targets, np.int64)
    return Datum(tokens=np.array(tokens, np.int32), loss_inputs={"target_tokens": targets, **found})


def random_data(count: int, *, seed: int, policy: bool = False, vocab: int = 256) -> list[Datum]:
    """Return data of 4 to 23 tokens, with no weight or advantage on the first third."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        num_tokens = int(random.integers(4, 24))
        tokens = random.integers(0, vocab, num_tokens).tolist()
        counts = np.arange(num_tokens) >= num_tokens // 3
        if policy:
            advantages = np.where(counts, random.normal(0, 1), 0.0)
            logprobs = np.where(counts, random.normal(-5.7, 0.3, num_tokens), 0.0)
            data.append(datum(tokens, advantages=advantages, logprobs=logprobs))
        else:
            data.append(datum(tokens, weights=counts))
    return data


# Calls on a backend, translated as the service translates them


async def create(backend: TinkerBackend, model_id: str, made: ModelSettings) -> None:
    adapters = None if made.lora is None else make_lora_config(made.lora, backend.base_model)
    async with backend.lock_trainer() as trainer:
        await trainer.create_model(model_id, adapters)


async def save(backend: TinkerBackend, model_id: str, folder: Path, *, optimizer: bool) -> None:
    async with backend.lock_trainer() as trainer:
        await trainer.save_model(model_id, str(folder), optimizer=optimizer)


async def load(backend: TinkerBackend, model_id: str, folder: Path, *, optimizer: bool) -> None:
    async with backend.lock_trainer() as trainer:
        await trainer.load_model(model_id, str(folder), optimizer=optimizer)


async def open_saved(backend: TinkerBackend, made: ModelSettings, folder: Path) -> int:
    assert made.lora is not None
    return await backend.open(make_lora_config(made.lora, backend.base_model), folder)


async def add_gradient(
    backend: TinkerBackend,
    model_id: str,
    data: list[Datum],
    loss: WireLoss = CROSS_ENTROPY,
    *,
    backward: bool = True,
) -> Output:
    made, built = make_samples(data, loss, backend.base_model), loss.build({})
    async with backend.lock_trainer() as trainer:
        if backward:
            result = await trainer.forward_backward(
                made.samples, loss=built, return_logprobs=True, model_id=model_id
            )
        else:
            result = await trainer.forward(made.samples, loss=built, model_id=model_id)
    return Output(made.split_logprobs(result.logprobs or ()), collect_metrics(result, loss))


async def step(backend: TinkerBackend, model_id: str, **adam: Any) -> float:
    """Step and return the norm of the gradient."""
    params = check_optim_params(AdamParams(**{"learning_rate": 1e-2} | adam))
    async with backend.lock_trainer() as trainer:
        return (await trainer.optim_step(params, allow_empty=True, model_id=model_id)).grad_norm


async def train(
    backend: TinkerBackend, model_id: str, *, seed: int = 1, steps: int = 2
) -> list[Output]:
    """Make steps of cross entropy and ppo in turns; return their outputs."""
    outputs = []
    for number in range(steps):
        data = random_data(5, seed=seed + number, policy=number % 2 == 1)
        outputs.append(
            await add_gradient(backend, model_id, data, PPO if number % 2 else CROSS_ENTROPY)
        )
        await step(backend, model_id)
    return outputs


async def created(
    backend: TinkerBackend, model_id: str, *, rank: int = 4, steps: int = 2
) -> list[Output]:
    """Create a model and train it a few steps."""
    await create(backend, model_id, settings(rank))
    return await train(backend, model_id, steps=steps)


def request(base: Any, tokens: list[int], **how: Any) -> SampleRequest:
    """Check a call against a `BaseModelInfo`; 8 tokens with seed 3 by default."""
    return check_sample(prompt(*tokens, **({"max_tokens": 8, "seed": 3} | how)), base)


async def sampled(backend: TinkerBackend, version: int, **how: Any) -> SampleOutput:
    """Sample 12 tokens, greedily unless told otherwise."""
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "stop": ()} | how
    return await backend.sample(version, request(backend.base_model, [3, 1, 4, 1, 5], **asked))


def tokens_of(output: SampleOutput) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in output.completions]


def assert_same_outputs(found: list[Output], expected: list[Output], *, atol: float = 1e-5) -> None:
    """Compare logprobs and losses of `forward_backward`; an `atol` of 0 asks for equal bits."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.metrics.keys() == theirs.metrics.keys()
        np.testing.assert_allclose(
            mine.metrics["loss:sum"], theirs.metrics["loss:sum"], rtol=atol, atol=atol
        )
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=atol, rtol=0)
