"""Small model, samples, engines and comparisons shared by the tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples import custom_model
from rl.models import gemma3_text, qwen3, qwen3_moe
from rl.models.decoder import FeedForward
from rl.models.files.hf import write_hf_folder
from rl.models.files.peft import write_peft_folder
from rl.models.files.tokenizer import build_byte_tokenizer
from rl.models.layers.moe import MoE
from rl.models.lora import ALL_LINEAR
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import TrainingSample
from tests.support.policies import full_logits

VOCAB = 320
RANK = 3
"""Rank of LoRA's adapters."""
BIAS_RATE = 0.01
"""Change of an expert's bias in a step."""


def spec_like(
    family: Any, *, dim: int, head_dim: int, feed_forward: Any, tie: bool = True, **switches: Any
) -> ModelSpec:
    """Return a model of two layers; `switches` are further arguments of the adapter's `sized`."""
    spec = family.model_registry("tiny")
    model = spec.adapter.sized(
        vocab_size=VOCAB, dim=dim, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=head_dim,
        feed_forward=feed_forward, tie_embeddings=tie, theta=1e4, max_positions=64, **switches,
    )  # fmt: skip
    return replace(spec, model=model)


def small_spec(*, tie: bool = True) -> ModelSpec:
    """Return a model of two layers of width 36, which shards do not all divide evenly."""
    return spec_like(
        qwen3, dim=36, head_dim=6, feed_forward=FeedForward.Config(hidden_dim=20), tie=tie
    )


def windowed_spec(*, tie: bool = True, bias: bool = False) -> ModelSpec:
    """Return `small_spec` as a Gemma 3 whose first layer sees five tokens, or one with a bias in
    each layer.
    """
    ffn = FeedForward.Config(hidden_dim=20, bias=bias)
    switches = {"window": 5, "global_layers": (1,), "attention_bias": bias}
    return spec_like(gemma3_text, dim=36, head_dim=6, feed_forward=ffn, tie=tie, **switches)


def granite_spec() -> ModelSpec:
    """Return a model of a family that is not relay's own, with an output head."""
    feed_forward = FeedForward.Config(hidden_dim=20)
    switches = {"attention_bias": True, "multipliers": custom_model.MULTIPLIERS}
    return spec_like(
        custom_model, dim=36, head_dim=6, feed_forward=feed_forward, tie=False, **switches
    )


def even_spec(*, tie: bool = True) -> ModelSpec:
    """Return a model of sizes that float8 can multiply, even on each of two tensor-parallel
    ranks.
    """
    return spec_like(
        qwen3, dim=32, head_dim=16, feed_forward=FeedForward.Config(hidden_dim=64), tie=tie
    )


def even_moe_spec() -> ModelSpec:
    """Return `even_spec` with four experts in each layer."""
    experts = MoE.Config(num_experts=4, num_experts_per_token=2, hidden_dim=32)
    return spec_like(qwen3_moe, dim=32, head_dim=16, feed_forward=experts)


def moe_spec(*, tie: bool = False) -> ModelSpec:
    """Return two layers of width 36, six experts of width 20: sizes that not all shards divide
    evenly.

    Without `tie` the output head has a weight of its own, as in all large mixtures.
    """
    experts = MoE.Config(num_experts=6, num_experts_per_token=2, hidden_dim=20)
    return spec_like(qwen3_moe, dim=36, head_dim=6, feed_forward=experts, tie=tie)


def write_assets(folder: Path, *, tie: bool = True, spec: ModelSpec | None = None) -> str:
    """Write large weights, uneven norms and uneven biases of experts, so that each of them
    matters.
    """
    spec = spec or small_spec(tie=tie)
    model = spec.model.build()
    model.init_weights(seed=3, std=0.2)
    generator = torch.Generator().manual_seed(4)
    tensors = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith(("norm.weight", "bias")):
                # Layers' biases of 0.3 would put a token at the bound of the clipped ratio, where
                # rounding decides.
                size = (
                    0.05
                    if name.endswith("load_balance_bias")
                    else 0.3
                    if name.endswith("weight")
                    else 0.2
                )
                tensor += size * torch.randn(tensor.shape, generator=generator)
    with tempfile.TemporaryDirectory() as tokenizer:
        build_byte_tokenizer(tokenizer)
        adapter = spec.adapter(spec.model)
        write_hf_folder(
            folder, tensors.items(), adapter, dtype=torch.float32, tokenizer_from=tokenizer
        )
    return str(folder)


def random_factors(
    spec: ModelSpec, *, scale: float, modules: Sequence[str] = (*ALL_LINEAR, "lm_head")
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) by the Hugging Face name of the weight; B is not zero, so neither is the
    gradient of A.
    """
    with torch.device("meta"):
        model = spec.model.build()
    adapter = spec.adapter(spec.model)
    generator = torch.Generator().manual_seed(8)
    return {
        name: (
            scale * torch.randn(RANK, weight.size(1), generator=generator),
            scale * torch.randn(weight.size(0), RANK, generator=generator),
        )
        for ours, parameter in model.named_parameters()
        for name, weight in adapter.to_hf(ours, parameter).items()
        if name.removesuffix(".weight").rpartition(".")[2] in modules
    }


def write_adapter(folder: Path, factors: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """Write factors, whose products have a scale of 2."""
    triples = ((name, a, b) for name, (a, b) in factors.items())
    write_peft_folder(folder, triples, rank=RANK, alpha=2.0 * RANK, base_model=None)
    return str(folder)


def make_sample(
    *, length: int, seed: int, temperature: float = 1.0, prompt_seed: int | None = None
) -> TrainingSample:
    """Return random tokens; the first third is a prompt, and one token of the rest was not drawn.

    Samples with one `prompt_seed` have the same prompt if their prompts have the same length.
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
    """Return samples of 2 to 19 tokens with shared prompts of up to 6 tokens and temperatures 1 and
    0.7.
    """
    return [
        make_sample(
            length=2 + (7 * i) % 18,
            seed=100 + i,
            temperature=0.7 if i % 3 == 0 else 1.0,
            prompt_seed=99,
        )
        for i in range(count)
    ]


def with_targets(sample: TrainingSample, *, k: int | None = None, seed: int = 0) -> TrainingSample:
    """Return the sample with random targets and weights, [T] or [T, K]; the mask leaves some out,
    and entry
    0."""
    random = np.random.default_rng([seed, len(sample.token_ids), 0 if k is None else k])
    shape = (len(sample.token_ids),) if k is None else (len(sample.token_ids), k)
    mask = random.random(shape) < 0.8
    mask[0], mask[-1] = False, True
    return replace(
        sample,
        targets=random.integers(0, VOCAB, shape),
        mask=mask,
        advantages=random.normal(size=shape).astype(np.float32),
        generator_logprobs=random.normal(-5.7, 0.3, shape).astype(np.float32),
    )


def engine_config(**settings: Any) -> TrainingEngine.Config:
    """Return a config; settings are fields of the engine's config or of its training."""
    own = {
        f.name: settings.pop(f.name) for f in fields(TrainingEngine.Config) if f.name in settings
    }
    training: dict[str, Any] = {"max_tokens_per_microbatch": 40, "max_norm": 0.5} | settings
    return TrainingEngine.Config(
        # A large eps keeps the first steps from being mere signs of tiny gradients.
        optimizer=Optimizer.Config(lr=1e-2, eps=1e-2, weight_decay=0.1),
        training=TrainingConfig(**training),
        **own,
    )


def make_engine(
    assets: str | None, *, spec: ModelSpec | None = None, **kwargs: Any
) -> TrainingEngine:
    """Build an engine; `failure_folder` and `world` go to `build`, all other keywords to
    `engine_config`.
    """
    runtime = {name: kwargs.pop(name) for name in ("failure_folder", "world") if name in kwargs}
    return built(engine_config(**kwargs), assets, spec=spec, **runtime)


def built(
    config: TrainingEngine.Config,
    assets: str | None = None,
    *,
    spec: ModelSpec | None = None,
    **runtime: Any,
) -> TrainingEngine:
    return config.build(
        model_spec=spec or small_spec(), hf_assets_path=assets, device="cpu", **runtime
    )


def step(engine):
    """Take one optimizer step on all samples and return its loss and gradient norm."""
    loss = engine.forward_backward(make_samples()).loss_sum
    return loss, engine.optim_step().grad_norm


def gradients(engine):
    """Return copies of all parameters' gradients by name."""
    return {
        name: p.grad.clone() for name, p in engine.policy.parameters.items() if p.grad is not None
    }


def weights(engine):
    """Return copies of the plain model's weights by name."""
    return {name: tensor.clone() for name, tensor in engine.model_state_dict().items()}


def assert_near(actual, expected, *, relative=1e-5):
    """Compare tensors or arrays by the norm of their difference; relative=0 compares bits."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        wanted = torch.as_tensor(tensor)
        difference, norm = (torch.as_tensor(actual[name]) - wanted).norm(), wanted.norm()
        assert difference <= relative * norm, f"{name}: {difference} of {norm}"


def logprobs_of(result):
    """Return the logprobs that `return_logprobs` asked for."""
    assert result.logprobs is not None
    return result.logprobs


def plain_logprobs(model, sample):
    """Return logprobs [T - 1, V] of one sample, computed in the plainest way."""
    return (full_logits(model, sample.token_ids[:-1]) / sample.temperature).log_softmax(-1)


def plain_model(engine):
    """Return an unsharded model with the engine's weights."""
    model = small_spec().model.build()
    model.load_state_dict(
        {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    )
    return model
