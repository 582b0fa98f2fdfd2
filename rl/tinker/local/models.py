"""One model in training: an engine, with the wire's settings and data.

The local backend has it in one process, the actors' one on every rank of its trainer.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl.distributed.process_group import World, everywhere
from rl.distributed.seeds import random_states, restore_random_states
from rl.distributed.shards import local_shard_of, local_tensor
from rl.rollouts.samples import demonstration_sample
from rl.tinker.adam import check_adam
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.data import WireSamples, wire_samples
from rl.tinker.local.layout import Layout, gathered, share_frozen
from rl.tinker.local.lora import ModelPlan, check_products, same_shape
from rl.tinker.local.losses import HIGH, make_loss, wire_loss
from rl.tinker.local.saved import OPTIMIZER, WEIGHTS, SavedModel, read_saved, write_saved
from rl.tinker.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoRASettings,
    LossCall,
    ModelSettings,
    OptimStepOutput,
)
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.errors import NonFiniteLossError
from rl.types import ForwardBackwardResult, OptimParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerWeights:
    """What a sampler runs. Nobody writes into these tensors."""

    base: Base
    lora: LoRASettings | None
    trained: Mapping[str, Tensor]
    """By our names: LoRA's factors, or all parameters; none of a base model itself."""


PROBED_TOKENS = 16
"""Of what a model is asked about before others sample from it."""


class LocalModel:
    """All calls come from one thread; where there are several ranks, all make the same calls."""

    def __init__(
        self, base: Base, settings: ModelSettings, *, training: TrainingConfig, layout: Layout | None = None
    ) -> None:
        """`layout` None is this process alone; with one, the settings say the seed of the adapters."""
        self.base = base
        self.settings = settings
        lora = settings.lora
        assert layout is None or lora is None or lora.seed is not None, "ranks would draw each their own"
        seed = secrets.randbits(62) if lora is None or lora.seed is None else lora.seed
        plan = ModelPlan.of(base.spec, lora, seed=seed)
        template = TrainingEngine.Config() if layout is None else layout.config
        config = replace(template, training=replace(training), converters=plan.converters)
        world = World() if layout is None else layout.world
        # An engine seeds the process's generators, which are the notebook's too.
        states = random_states()
        self.engine: TrainingEngine = config.build(
            model_spec=plan.spec,
            hf_assets_path=str(base.folder),
            device=base.device,
            world=world,
            place=None if layout is None else layout.place,
        )
        restore_random_states(states)
        self._writes = world.rank == 0
        if lora is not None:
            share_frozen(self.engine.policy.parameters, base.weights if layout is None else layout.frozen)
        if base.spec.batch_invariant and lora is not None and layout is None and base.device.type == "cpu":
            self._check_products(lora.rank)

    def forward_backward(
        self, data: Sequence[Datum], call: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        """As `Backend.forward_backward`.

        Raises:
            InvalidRequestError: as `check_data`, with everything as it was; or the loss is not finite. With
                `backward` the model's accumulated gradient is dropped then, that of earlier calls too.
        """
        samples = wire_samples(data, call, self.base.data_rules)
        run = self._backward if backward else self._forward
        result = run(samples, call)
        assert result.logprobs is not None
        return ForwardBackwardOutput(
            logprobs=samples.logprobs(result.logprobs), metrics=_metrics(result, call)
        )

    def _backward(self, samples: WireSamples, call: LossCall) -> ForwardBackwardResult:
        try:
            return self.engine.forward_backward(samples.samples, loss=make_loss(call), return_logprobs=True)
        except NonFiniteLossError as error:
            raise InvalidRequestError(
                f"forward_backward: the summed loss is not a finite number ({error.what}). The gradient that "
                "this model had accumulated is dropped, of earlier calls too; its weights are as they were"
            ) from error

    def _forward(self, samples: WireSamples, call: LossCall) -> ForwardBackwardResult:
        try:
            return self.engine.forward(samples.samples, loss=make_loss(call))
        except NonFiniteLossError as error:
            raise InvalidRequestError(
                f"forward: the summed loss is not a finite number ({error.what})"
            ) from error

    def optim_step(self, params: AdamParams) -> OptimStepOutput:
        """As `Backend.optim_step`.

        Raises:
            InvalidRequestError: a setting out of range, with everything as it was; or the gradient is not
                finite: it is dropped, the weights are as they were.
        """
        check_adam(params)
        clips = params.grad_clip_norm > 0.0
        settings = OptimParams(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_norm=params.grad_clip_norm if clips else math.inf,
        )
        try:
            result = self.engine.optim_step(settings, allow_empty=True)
        except NonFiniteLossError as error:
            raise InvalidRequestError(
                f"optim_step: the gradient is not finite ({error.what}). It is dropped; the model's weights "
                "are as they were"
            ) from error
        return OptimStepOutput(metrics={"grad_norm:mean": result.grad_norm})

    def snapshot(self) -> SamplerWeights:
        """A copy of the weights as they are now."""
        dtype = self.base.serve_dtype
        return SamplerWeights(
            base=self.base,
            lora=self.settings.lora,
            trained={name: tensor.to(dtype, copy=True) for name, tensor in self._trained().items()},
        )

    def check_finite(self) -> None:
        """Raise InvalidRequestError where the weights are such that nothing could be sampled."""
        tokens = np.arange(min(PROBED_TOKENS, self.base.context), dtype=np.int32)
        (logprobs,) = self.engine.compute_logprobs([demonstration_sample(tokens[:1], tokens[1:])])
        if not np.isfinite(logprobs).all():
            raise InvalidRequestError(
                "the model's logprobs are not finite: its weights have diverged, and cannot be sampled from"
            )

    def save_state(self, folder: Path) -> None:
        """Weights and optimizer state."""
        self._write(folder, {WEIGHTS: self._trained(), OPTIMIZER: self._optimizer_state()})

    def save_sampler(self, folder: Path) -> None:
        """Weights alone."""
        self._write(folder, {WEIGHTS: self._trained()})

    def _write(self, folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """By the first rank, what all have."""
        whole = {file: gathered(content, keep=self._writes) for file, content in tensors.items()}
        if self._writes:
            write_saved(folder, self._description(), whole)

    def load_state(self, folder: Path, *, optimizer: bool) -> None:
        """As `Backend.load_state`; where it raises InvalidRequestError everything is as it was."""
        names = (WEIGHTS, OPTIMIZER) if optimizer else (WEIGHTS,)
        into = [self._trained(), self._optimizer_state()][: len(names)]
        found = self._read(folder, dict(zip(names, into, strict=True)))
        self.engine.drop_gradient()
        with torch.no_grad():
            for present, read in zip(into, found, strict=True):
                for key, tensor in present.items():
                    local_tensor(tensor).copy_(local_shard_of(read[key], tensor))
        if not optimizer:
            self.engine.optimizer.reset()

    def _read(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """What the files have of these tensors; on all ranks, or none."""
        failure: Exception | None = None
        found: list[dict[str, Tensor]] = []
        try:
            saved, found = read_saved(folder, *files)
            check_saved(saved, self.base, self.settings)
            for (name, present), read in zip(files.items(), found, strict=True):
                check_tensors(name, read, {key: tuple(tensor.shape) for key, tensor in present.items()})
        except (InvalidRequestError, OSError) as error:
            failure = error
        if not everywhere(failure is None):
            raise failure or InvalidRequestError("the saved model cannot be read on every rank")
        return found

    def close(self) -> None:
        self.engine.close()

    def _check_products(self, rank: int) -> None:
        """The bits of samples are promised of the base; with adapters only a warning is due."""
        rows = self.engine.config.training.max_tokens_per_microbatch
        try:
            check_products(self.engine.policy.model, dtype=self.base.serve_dtype, max_rows=rows)
        except ValueError as error:
            logger.warning("%s, rank %d: %s", self.base.config.name, rank, error)

    def _trained(self) -> dict[str, Tensor]:
        """The very tensors."""
        return {name: p.detach() for name, p in self.engine.policy.trained_parameters.items()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        """The very tensors."""
        states = self.engine.optimizer.state_tensors()
        parameters = self.engine.policy.trained_parameters
        return {f"{n}.{key}": tensor for n, p in parameters.items() for key, tensor in states[p].items()}

    def _description(self) -> SavedModel:
        return SavedModel(base_fingerprint=self.base.fingerprint, lora=self.settings.lora)


def open_saved(base: Base, settings: ModelSettings, folder: Path) -> SamplerWeights:
    """Of a folder that a model with such settings was saved in.

    Raises:
        InvalidRequestError: names the file that is missing or damaged, or what does not fit.
    """
    saved, (weights,) = read_saved(folder, WEIGHTS)
    check_saved(saved, base, settings)
    module = ModelPlan.of(base.spec, settings.lora).module(device=base.device)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if settings.lora is not None:
        shapes = {name: shape for name, shape in shapes.items() if name not in base.weights}
    check_tensors(WEIGHTS, weights, shapes)
    trained = {name: t.to(device=base.device, dtype=base.serve_dtype) for name, t in weights.items()}
    return SamplerWeights(base=base, lora=settings.lora, trained=trained)


def check_saved(saved: SavedModel, base: Base, settings: ModelSettings) -> None:
    """Raise InvalidRequestError unless what was saved is of a model with these settings."""
    if saved.base_fingerprint != base.fingerprint:
        raise InvalidRequestError(
            f"the saved model was trained on other weights than base_model={base.config.name!r} has"
        )
    if not same_shape(saved.lora, settings.lora, spec=base.spec):
        raise InvalidRequestError(
            f"the saved model has other settings: {saved.lora or 'all parameters'}, this one "
            f"{settings.lora or 'all parameters'}"
        )


def check_tensors(name: str, found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidRequestError unless a file has the tensors that are needed."""
    if {key: tuple(tensor.shape) for key, tensor in found.items()} != dict(shapes):
        raise InvalidRequestError(f"the saved model's file {name} has other tensors than the model")


def _metrics(result: ForwardBackwardResult, call: LossCall) -> dict[str, float]:
    """Sums and maxima alone: those of chunks make those of the whole."""
    num_tokens = result.num_valid_tokens
    metrics = {
        "loss:sum": result.loss_sum,
        "num_tokens:sum": float(num_tokens),
        "entropy:sum": result.entropy_mean * num_tokens,
    }
    if HIGH in wire_loss(call).defaults:
        metrics["num_clipped:sum"] = float(round(result.clipped_fraction * num_tokens))
    if call.name != "cross_entropy":
        metrics["logprob_diff:sum"] = result.logprob_diff_mean * num_tokens
        metrics["logprob_diff:max"] = result.logprob_diff_max
    return metrics
