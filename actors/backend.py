"""The protocols of `rl.protocols`, implemented by calls to actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.calls import ActorGroup
from losses.types import Loss
from rl.training.config import Dtype
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    PublishResult,
    PushResult,
    Rollout,
    SamplingParams,
    Score,
    TrainingSample,
)
from rl.weights.store import WeightStore


class ActorLearner:
    """A `Learner` over the ranks of a `PolicyTrainer`."""

    def __init__(self, trainer: ActorGroup) -> None:
        self.trainer = trainer

    async def forward_backward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        return await self._rank0("forward_backward", samples, loss, limit="train_s")

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        return await self._rank0("optim_step", params, limit="train_s")

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._rank0("compute_logprobs", samples, limit="train_s")

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        await self._rank0("save_checkpoint", folder, position, model_only, wait, limit="checkpoint_s")

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        return await self._rank0("load_checkpoint", folder, model_only, limit="checkpoint_s")

    async def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write the weights as a Hugging Face folder, in `checkpoint.export_dtype` when None."""
        await self._rank0("export_hf", folder, dtype, limit="checkpoint_s")

    async def save_adapter(self, folder: str) -> None:
        """Write LoRA's adapters as a folder that PEFT opens."""
        await self._rank0("save_adapter", folder, limit="checkpoint_s")

    async def _rank0(self, endpoint: str, *args: Any, limit: str) -> Any:
        return (await self.trainer.call(endpoint, *args, limit=limit))[0]


class ActorSampler:
    """A `Sampler` over one `VLLMGenerator`; rank 0 of its tensor-parallel ranks answers."""

    def __init__(self, generator: ActorGroup) -> None:
        self.generator = generator

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]]:
        answers = await self.generator.call("generate", list(prompts), sampling, limit="generate_s")
        return answers[0]


class ActorPublisher:
    """A `WeightPublisher`: trainer ranks push, the version is announced, the generator pulls."""

    def __init__(self, *, trainer: ActorGroup, generator: ActorGroup, store: WeightStore) -> None:
        self.trainer = trainer
        self.generator = generator
        self.store = store

    async def publish(self) -> PublishResult:
        started = time.perf_counter()
        pushes: list[PushResult] = await self.trainer.call("push_model_state_dict", limit="sync_s")
        version = pushes[0].policy_version
        await self.store.announce(version)
        pushed = time.perf_counter()
        await self.generator.call("pull_model_state_dict", version, limit="sync_s")
        await self.store.prune()
        return PublishResult(
            policy_version=version, push_s=pushed - started, pull_s=time.perf_counter() - pushed
        )


class ActorScorer:
    """A `Scorer` over the processes of a `RewardActor`."""

    def __init__(self, reward: ActorGroup, *, num_procs: int) -> None:
        self.reward = reward
        self.num_procs = num_procs

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        shares = [list(rollouts[i :: self.num_procs]) for i in range(self.num_procs)]
        answers = await self.reward.call("score", shares, limit="score_s")
        scores: list[Score | None] = [None] * len(rollouts)
        for i, answer in enumerate(answers):
            scores[i :: self.num_procs] = answer
        complete = [s for s in scores if s is not None]
        assert len(complete) == len(rollouts), f"{len(complete)} scores of {len(rollouts)} rollouts"
        return complete
