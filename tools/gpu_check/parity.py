"""Training of tiny models against the CPU: losses, packing, options, families, optimizers, sampler.

The reference computes in float32 on the CPU without the options that must not change a number. A
gradient's error is that of the worst parameter, relative to its norm; of an optimizer's step it is
the error of the whole update, relative to its norm.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses.policy import CISPOLoss, GRPOLoss, GSPOLoss, ImportanceSamplingLoss
from losses.types import Loss
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.models.generate import generate
from rl.models.lora import LoRA
from rl.models.spec import model_spec
from rl.training.config import ReferenceConfig, TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.muon import MuonConfig
from rl.training.optimizer import Optimizer
from rl.training.sleep import TrainerSleep
from rl.types import SamplingParams, TrainingSample
from tools.gpu_check.report import Report
from tools.gpu_check.training import samples_of

EXACT, HALF = 1e-3, 0.1
"""Largest relative error in float32, and of products in bfloat16 (0.03 on a CPU)."""
LEAST_NORM = 1e-3
"""Share of the whole gradient's norm below which a parameter's error is relative to that share."""
PROMPTS, COMPLETIONS = (40, 25), (30, 7, 1)
"""Lengths; each prompt has all completions."""
MAX_TOKENS = 128
LR = 1e-3
SAMPLED_TOKENS, SAMPLES = 32, 4
SAMPLED_PROMPTS = (5, 15, 25, 35)
"""Lengths of the prompts."""
OTHER_COMPLETIONS = 0.1
"""Share that may differ, because a random number fell on the border of two tokens."""
LOGPROB_ATOL = 1e-3
HALF_LOGPROB_ATOL = 0.03
"""Mean difference in nats that bfloat16 explains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One gradient that has to be the CPU's."""

    family: str = "qwen3"
    loss: Loss = field(default_factory=GRPOLoss)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine on both devices."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Options of `training` on the checked device alone."""
    rtol: float = EXACT
    reads_sizes: bool = False
    """True if sizes are computed on the device, so that it has to compute."""


RECOMPUTED = ActivationCheckpointConfig(mode="full")
IN_HALF = {"param_dtype": "bfloat16"}
UNBOUNDED = ImportanceSamplingLoss()
"""For bfloat16, whose rounding would take tokens across a bound: their gradient jumps there."""

GRADIENTS = {
    "GRPO": Case(),
    "GSPO": Case(loss=GSPOLoss()),
    "CISPO": Case(loss=CISPOLoss()),
    "KL and entropy": Case(
        loss=GRPOLoss(kl_coef=0.1, entropy_coef=0.01),
        options={"reference": ReferenceConfig(enable=True)},
    ),
    "prompts not shared": Case(training={"share_prompts": False}),
    "one sample at a time": Case(training={"max_sequences_per_microbatch": 1}),
    "logits in chunks": Case(training={"logits_chunk_tokens": 16}),
    "blocks computed again": Case(options={"activation_checkpoint": RECOMPUTED}),
    "adapters": Case(options={"converters": (LoRA.Config(rank=8),)}),
    "experts": Case(family="qwen3_moe", reads_sizes=True),
    "windows": Case(family="gemma3_text"),
    "bfloat16": Case(loss=UNBOUNDED, training=IN_HALF, rtol=HALF),
    "bfloat16, prompts not shared": Case(
        loss=UNBOUNDED, training=IN_HALF | {"share_prompts": False}, rtol=HALF
    ),
    "bfloat16, windows": Case(family="gemma3_text", loss=UNBOUNDED, training=IN_HALF, rtol=HALF),
}

UPDATES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "AdamW": ({}, {}, EXACT),
    "Muon": ({"name": "Muon", "muon": MuonConfig(compute_dtype="float32")}, {}, EXACT),
    "Muon in bfloat16": ({"name": "Muon"}, {}, HALF),
    "AdamW on bfloat16 weights": ({}, {"dtype": "bfloat16", **IN_HALF}, HALF),
    "Muon on bfloat16 weights": ({"name": "Muon"}, {"dtype": "bfloat16", **IN_HALF}, HALF),
}
"""Options of the optimizer and of `training`, and the largest relative error."""


def parity(report: Report, *, device: str = "cuda") -> None:
    """Compare every case; an error in one does not keep the others from being compared."""
    parts: dict[str, Callable[[], None]] = {}
    for name, case in GRADIENTS.items():
        if report.numbers or not case.reads_sizes:
            parts[f"gradient, {name}"] = partial(_compare_gradients, report, name, case, device)
    for name in UPDATES:
        parts[f"update, {name}"] = partial(_compare_updates, report, name, device)
    parts["early steps"] = partial(_compare_early_steps, report, device)
    parts["sleep"] = partial(_compare_after_sleep, report, device)
    if report.numbers:  # The sampler repeats rows as often as the device says.
        parts["sampler"] = partial(_compare_samplers, report, device)
    for name, compare in parts.items():
        try:
            compare()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's fault
            traceback.print_exc()
            report.faults.append(f"{name}: {type(error).__name__}: {error}")


def _build_engine(
    *, family: str = "qwen3", device: str, training: Mapping[str, Any], **options: Any
) -> TrainingEngine:
    """Return an engine of a tiny model with the same weights on every device."""
    settings = {"max_tokens_per_microbatch": MAX_TOKENS} | dict(training)
    return TrainingEngine(
        config=TrainingEngine.Config(training=TrainingConfig(**settings), **options),
        model_spec=model_spec(family, "tiny"),
        hf_assets_path=None,
        device=device,
    )


def build_samples(*, vocab_size: int) -> list[TrainingSample]:
    """Return groups of completions of one prompt, with ratios on both sides of the clip."""
    random = np.random.default_rng(0)
    samples = []
    for prompt_length in PROMPTS:
        prompt = random.integers(0, vocab_size, prompt_length)
        for index, length in enumerate(COMPLETIONS):
            ids = np.concatenate((prompt, random.integers(0, vocab_size, length)))
            mask = np.arange(len(ids)) >= prompt_length
            # Fresh weights are close to a uniform distribution.
            logprobs = random.normal(-np.log(vocab_size), 0.3, len(ids))
            samples.append(
                TrainingSample(
                    token_ids=ids.astype(np.int32),
                    mask=mask,
                    generator_logprobs=np.where(mask, logprobs, np.nan).astype(np.float32),
                    advantages=(mask * (1.0 - index)).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
    return samples


def _compare_gradients(report: Report, name: str, case: Case, device: str) -> None:
    samples = build_samples(vocab_size=model_spec(case.family, "tiny").model.vocab_size)
    gradients, losses = [], []
    for place, training in (("cpu", {}), (device, case.training)):
        engine = _build_engine(
            family=case.family, device=place, training=training, loss=case.loss, **case.options
        )
        losses.append(engine.forward_backward(samples).loss_sum)
        gradients.append(_copy_gradients(engine))
    wanted, got = gradients
    report.same(f"the loss, {name}", abs(losses[1] - losses[0]) / len(samples), atol=case.rtol)
    report.same(f"the gradient, {name}", _find_worst_error(got, wanted), atol=case.rtol)


def _copy_gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in engine.policy.trained_parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = parameter.grad.detach().cpu().double()
    return gradients


def _find_worst_error(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient; NaN if any is NaN."""
    assert got.keys() == wanted.keys()
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    errors = []
    for name, gradient in wanted.items():
        least = torch.maximum(gradient.norm(), LEAST_NORM * whole)
        errors.append((got[name] - gradient).norm() / least)
    return float(torch.stack(errors).max())  # `max` of tensors passes on a NaN.


def _compare_updates(report: Report, name: str, device: str) -> None:
    """Compare two steps with given gradients, so that only the optimizer can differ."""
    options, training, rtol = UPDATES[name]
    updates = []
    for place in ("cpu", device):
        engine = _build_engine(
            device=place, training=training, optimizer=Optimizer.Config(lr=LR, **options)
        )
        before = _copy_weights(engine)
        generator = torch.Generator().manual_seed(1)
        for version in range(2):
            for parameter in engine.policy.trained_parameters.values():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(parameter)
            engine.optimizer.step(engine.optimizer.make_settings(lr=LR), version=version)
        updates.append(_copy_weights(engine) - before)
    wanted, got = updates
    error = float((got - wanted).norm() / wanted.norm())
    report.same(f"the update, {name}", error, atol=rtol)


def _copy_weights(engine: TrainingEngine) -> Tensor:
    """Return all weights as one vector in float64."""
    weights = engine.policy.trained_parameters.values()
    return torch.cat([weight.detach().flatten().cpu().double() for weight in weights])


def _compare_early_steps(report: Report, device: str) -> None:
    """Compare steps in the backward with a step after it, both on the device."""
    samples = build_samples(vocab_size=model_spec("qwen3", "tiny").model.vocab_size)
    weights = []
    for early in (False, True):
        engine = _build_engine(
            device=device,
            training={"max_norm": float("inf")},
            loss=GRPOLoss(normalization="none"),
            optimizer=Optimizer.Config(lr=LR, early_step_in_backward=early),
        )
        engine.forward_backward(samples)
        engine.optim_step()
        weights.append(_copy_weights(engine))
    report.close("weights stepped in the backward", weights[1], weights[0], atol=0.01 * LR)


def _compare_after_sleep(report: Report, device: str) -> None:
    engine = _build_engine(device=device, training={})
    engine.forward_backward(build_samples(vocab_size=engine.policy.spec.model.vocab_size))
    engine.optim_step()
    before = _copy_weights(engine)
    sleep = TrainerSleep(engine)
    sleep.sleep()
    sleep.wake()
    report.close("weights after sleep", _copy_weights(engine), before, atol=0.0)


def _compare_samplers(report: Report, device: str) -> None:
    """Compare what the plain sampler draws with the CPU's, and its logprobs with the trainer's."""
    random = np.random.default_rng(0)
    vocab_size = model_spec("qwen3", "tiny").model.vocab_size
    prompts = [random.integers(0, vocab_size, n).astype(np.int32) for n in SAMPLED_PROMPTS]
    sampling = SamplingParams(max_tokens=SAMPLED_TOKENS, num_samples=SAMPLES, seed=1)
    drawn, engines = [], []
    in_half = {"dtype": "bfloat16", **IN_HALF}
    for place, training in (("cpu", {}), (device, {}), (device, in_half)):
        engine = _build_engine(device=place, training=training)
        engines.append(engine)
        drawn.append(generate(engine.policy.whole, prompts, sampling=sampling))

    differ, largest = [], 0.0
    for wanted, got in zip(chain(*drawn[0]), chain(*drawn[1]), strict=True):
        same = np.array_equal(wanted.token_ids, got.token_ids)
        differ.append(not same)
        if same:
            largest = max(largest, float(np.abs(wanted.logprobs - got.logprobs).max()))
    report.same("share of sampled completions", float(np.mean(differ)), atol=OTHER_COMPLETIONS)
    report.same("sampled logprobs", largest, atol=LOGPROB_ATOL)
    for name, completions, engine, atol in (
        ("float32", drawn[1], engines[1], LOGPROB_ATOL),
        ("bfloat16", drawn[2], engines[2], HALF_LOGPROB_ATOL),
    ):
        difference = _compare_with_trainer(engine, prompts, completions)
        report.same(f"the trainer's and the sampler's logprobs in {name}", difference, atol=atol)


def _compare_with_trainer(
    engine: TrainingEngine, prompts: list[np.ndarray], completions: list[list[Any]]
) -> float:
    """Return the mean difference in nats between a completion's logprobs and the trainer's."""
    whole, drawn = [], []
    for prompt, of_prompt in zip(prompts, completions, strict=True):
        for completion in of_prompt:
            whole.append(np.concatenate((prompt, completion.token_ids)))
            drawn.append(completion.logprobs)
    scored = engine.compute_logprobs(samples_of(whole))
    differences = [
        np.abs(of_trainer[-len(own) :] - own) for of_trainer, own in zip(scored, drawn, strict=True)
    ]
    return float(np.concatenate(differences).mean())
