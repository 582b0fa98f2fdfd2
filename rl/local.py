"""Learner, sampler and publisher in this process, on one device: no actors, no engine but PyTorch's.

For notebooks, examples and tests. It is the same training engine, and the same model definition sampled by
`rl.models.generate`; weights are published as a copy, so that what samples is a version and no half step.

    async with LocalBackend(config, spec=..., hf_assets_path=...) as local:
        version = await local.push(); await local.serve(version)
        groups = await local.generate(prompts, sampling=...)
        await local.forward_backward(samples); await local.optim_step()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from losses.types import Loss
from rl.models.generate import generate
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.protocols import Scorer
from rl.rollouts.rubric import Rubric
from rl.training.engine import TrainingEngine
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    Rollout,
    SamplingParams,
    Score,
    ServeResult,
    TrainingSample,
)

ResultT = TypeVar("ResultT")


class LocalBackend:
    """A `Learner`, a `Sampler` and a `WeightPublisher`.

    The learner's calls run one after another in a thread, the sampler's in another, so that a loop may let
    them overlap.
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        *,
        spec: ModelSpec,
        hf_assets_path: str,
        device: torch.device | str | None = None,
    ) -> None:
        """Raises ValueError as `TrainingEngine` does."""
        self.engine: TrainingEngine = config.build(
            model_spec=spec, hf_assets_path=hf_assets_path, device=device
        )
        model = self.engine.policy.spec.model.build().to(self.engine.device)
        self._model: Qwen3 = model.requires_grad_(False)
        self._served_version = -1
        self._pushed: dict[int, dict[str, Tensor]] = {}
        self._learning = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._sampling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End both threads, after what they are at. Idempotent."""
        self._learning.shutdown()
        self._sampling.shutdown()
        self.engine.close()

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """As `Sampler.generate`; calls take turns.

        Raises:
            RuntimeError: no weights were published yet.
        """
        if self._served_version < 0:
            raise RuntimeError("no weights to sample from: push and serve first")
        return await _within(self._sampling, lambda: self._generate(list(prompts), sampling))

    def _generate(self, prompts: list[np.ndarray], sampling: SamplingParams) -> list[list[Completion]]:
        return generate(self._model, prompts, sampling=sampling, policy_version=self._served_version)

    async def forward_backward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        return await _within(self._learning, lambda: self.engine.forward_backward(samples, loss=loss))

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        return await _within(self._learning, lambda: self.engine.optim_step(params))

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await _within(self._learning, lambda: self.engine.compute_logprobs(samples))

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await _within(self._learning, lambda: self.engine.compute_reference_logprobs(samples))

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        await _within(
            self._learning,
            lambda: self.engine.save_checkpoint(folder, position=position, model_only=model_only, wait=wait),
        )

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        return await _within(
            self._learning, lambda: self.engine.load_checkpoint(folder, model_only=model_only)
        )

    async def export_hf(self, folder: str) -> None:
        await _within(self._learning, lambda: self.engine.export_hf(folder))

    async def push(self) -> int:
        """Keep a copy of the weights as they are now."""
        version, copy = await _within(self._learning, self._copy)
        self._pushed[version] = copy
        return version

    def _copy(self) -> tuple[int, dict[str, Tensor]]:
        with torch.no_grad():
            copy = {name: tensor.detach().clone() for name, tensor in self.engine.model_state_dict().items()}
        return self.engine.policy_version, copy

    async def serve(self, policy_version: int) -> ServeResult:
        """Let the next calls of `generate` sample from a pushed version, and forget those before it."""
        copy = self._pushed[policy_version]
        await _within(self._sampling, lambda: self._load(copy))
        self._served_version = policy_version
        self._pushed = {v: kept for v, kept in self._pushed.items() if v >= policy_version}
        return ServeResult()

    def _load(self, copy: dict[str, Tensor]) -> None:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        with torch.no_grad():
            for name, tensor in copy.items():
                tensors[name].copy_(tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalScorer(Scorer):
    """Scores in this process: no time limit, so for reward functions that one trusts to end."""

    rubric: Rubric

    async def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self.rubric.score_group, groups)))


async def _within(pool: ThreadPoolExecutor, function: Callable[[], ResultT], *args: Any) -> ResultT:
    return await asyncio.get_running_loop().run_in_executor(pool, function)
