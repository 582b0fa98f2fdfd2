"""A small model, samples and engines that the tests of this folder share."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.distributed.mesh import ParallelismConfig
from rl.models.hf import write_hf_folder
from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3.registry import model_registry
from rl.models.spec import ModelSpec
from rl.models.tokenizer import build_byte_tokenizer
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import TrainingSample

VOCAB = 320


def small_spec(*, tie: bool = True) -> ModelSpec:
    """Two layers of width 36: sizes that shards do not all divide evenly."""
    model = Qwen3.Config(
        vocab_size=VOCAB,
        dim=36,
        num_layers=2,
        tie_embeddings=tie,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, head_dim=6),
            feed_forward=FeedForward.Config(hidden_dim=20),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=64),
    )
    return replace(model_registry("tiny"), model=model)


def write_assets(folder: Path, *, tie: bool = True) -> str:
    """Weights larger than usual and uneven norms, so that every one of them matters."""
    spec = small_spec(tie=tie)
    model = spec.model.build()
    model.init_weights(seed=3, std=0.2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    with tempfile.TemporaryDirectory() as tokenizer:
        build_byte_tokenizer(tokenizer)
        parameters = model.named_parameters()
        adapter = spec.adapter(spec.model)
        write_hf_folder(folder, parameters, adapter, dtype=torch.float32, tokenizer_from=tokenizer)
    return str(folder)


def make_sample(
    *, length: int, seed: int, temperature: float = 1.0, prompt_seed: int | None = None
) -> TrainingSample:
    """Random tokens; the first third is a prompt, and one token of the rest was not drawn.

    Samples of one `prompt_seed` have the same prompt, if their prompts are of the same length.
    """
    random = np.random.default_rng(seed)
    prompt = max(1, length // 3)
    drawn = np.arange(length) >= prompt
    logprobs = random.normal(-5.7, 0.3, length).astype(np.float32)
    if length > prompt + 2:
        logprobs[prompt + 1] = np.nan
    token_ids = random.integers(0, VOCAB, length).astype(np.int32)
    if prompt_seed is not None:
        token_ids[:prompt] = np.random.default_rng(prompt_seed).integers(0, VOCAB, prompt)
    return TrainingSample(
        token_ids=token_ids,
        mask=drawn,
        generator_logprobs=np.where(drawn, logprobs, np.nan).astype(np.float32),
        advantages=np.where(drawn, random.normal(0.5, 1.0), 0.0).astype(np.float32),
        policy_versions=np.where(drawn, 0, -1).astype(np.int32),
        temperature=temperature,
    )


def make_samples(count: int = 13) -> list[TrainingSample]:
    """Lengths from 2 to 19, prompts of up to 6 tokens that others have too, temperatures 1 and 0.7."""
    return [
        make_sample(
            length=2 + (7 * i) % 18, seed=100 + i, temperature=0.7 if i % 3 == 0 else 1.0, prompt_seed=99
        )
        for i in range(count)
    ]


def engine_config(*, parallelism: ParallelismConfig | None = None, **training: Any) -> TrainingEngine.Config:
    settings: dict[str, Any] = {"max_tokens_per_microbatch": 40, "max_norm": 0.5} | training
    return TrainingEngine.Config(
        # A large eps keeps the first steps from being the mere signs of tiny gradients.
        optimizer=Optimizer.Config(lr=1e-2, eps=1e-2, weight_decay=0.1),
        parallelism=parallelism or ParallelismConfig(),
        training=TrainingConfig(**settings),
    )


def make_engine(assets: str | None, **kwargs: Any) -> TrainingEngine:
    """In a single process unless `parallelism` says otherwise; `failure_folder` may be given."""
    runtime = {name: kwargs.pop(name) for name in ("failure_folder", "world") if name in kwargs}
    return engine_config(**kwargs).build(
        model_spec=small_spec(), hf_assets_path=assets, device="cpu", **runtime
    )


def gradients(engine):
    """Of all parameters, by name."""
    return {name: p.grad.clone() for name, p in engine.policy.parameters.items()}


def assert_near(actual, expected, *, relative=1e-5):
    """Each tensor by the norm of the difference."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= relative * tensor.norm(), name


def logprobs_of(result):
    """What was asked for with `return_logprobs`."""
    assert result.logprobs is not None
    return result.logprobs


def plain_model(engine):
    """The engine's weights in a model of this process alone."""
    model = small_spec().model.build()
    model.load_state_dict({name: p.detach().clone() for name, p in engine.policy.parameters.items()})
    return model
