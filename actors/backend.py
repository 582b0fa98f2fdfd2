"""The protocols of `rl.protocols`, implemented by calls to actors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.calls import Group
from actors.sync_check import SyncCheck, give_up
from losses.types import Loss
from rl.errors import RunError
from rl.training.config import Dtype
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
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


class ActorLearner:
    """A `Learner` over the ranks of a `PolicyTrainer`."""

    def __init__(self, trainer: Group) -> None:
        self.trainer = trainer

    async def forward_backward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        return await self._rank0("forward_backward", samples, loss, limit="train_s")

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        return await self._rank0("optim_step", params, limit="train_s")

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._rank0("compute_logprobs", samples, limit="train_s")

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._rank0("compute_reference_logprobs", samples, limit="train_s")

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
    """A `ResumableSampler` over one `VLLMGenerator`; rank 0 of its tensor-parallel ranks answers."""

    def __init__(self, generator: Group) -> None:
        self.generator = generator
        self._running: set[str] = set()
        self._endings: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """As `ResumableSampler.generate`; a generator has one place for all sessions."""
        call_id = uuid.uuid4().hex
        self._running.add(call_id)
        try:
            answers = await self.generator.call(
                "generate", list(prompts), sampling, call_id, begun, limit="generate_s"
            )
        except asyncio.CancelledError:
            # Nobody waits for this either: what it cannot end goes on for nobody, until it is done.
            ending = asyncio.create_task(self._end(call_id))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            raise
        finally:
            self._running.discard(call_id)
        return answers[0]

    async def abort(self) -> int:
        """As `ResumableSampler.abort`; a call that still waits for its turn (`actors.turns`) runs then."""
        call_ids = sorted(self._running)
        if not call_ids:
            return 0
        return (await self.generator.call("abort", call_ids, limit="close_s"))[0]

    async def _end(self, call_id: str) -> None:
        try:
            await self.generator.call("abort", [call_id], limit="close_s")
        except RunError as error:
            logger.debug("a cancelled call to %s was not ended: %s", self.generator.name, error)


class ActorPublisher:
    """A `WeightPublisher`: trainer ranks push, every generator pulls and is checked."""

    def __init__(
        self, *, trainer: Group, generators: Sequence[Group], store: WeightStore, check: SyncCheck
    ) -> None:
        self.trainer = trainer
        self.generators = generators
        self.store = store
        self.check = check

    async def push(self) -> int:
        # Both are sent here and now, so that they come before whatever the trainer is asked for next. For
        # the canary's logprobs `serve` waits: generators pull meanwhile.
        push = asyncio.ensure_future(self.trainer.call("push_model_state_dict", limit="sync_s"))
        expected = None
        if self.check.canary is not None:
            answer = self.trainer.call("compute_logprobs", [self.check.canary.sample], limit="train_s")
            expected = asyncio.ensure_future(answer)
        try:
            pushes = await push
            version: int = pushes[0].policy_version
            await self.store.announce(version)
        except BaseException:
            if expected is not None:
                await give_up(expected)
            raise
        self.check.expect(version, sums=[s for push in pushes for s in push.sums], expected=expected)
        return version

    async def serve(self, policy_version: int) -> ServeResult:
        served = await self.check.pull(policy_version, generators=self.generators)
        await self.store.prune()
        return served


class ActorScorer:
    """A `Scorer` over the processes of a `RewardActor`."""

    def __init__(self, reward: Group, *, num_procs: int) -> None:
        self.reward = reward
        self.num_procs = num_procs

    async def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Score]]:
        rollouts = [r for group in groups for r in group]
        shares = [list(rollouts[i :: self.num_procs]) for i in range(self.num_procs)]
        answers = await self.reward.call("score", shares, limit="score_s")
        scores: list[Score | None] = [None] * len(rollouts)
        for i, answer in enumerate(answers):
            scores[i :: self.num_procs] = answer
        complete = [s for s in scores if s is not None]
        assert len(complete) == len(rollouts), f"{len(complete)} scores of {len(rollouts)} rollouts"
        it = iter(complete)
        return [[next(it) for _ in group] for group in groups]
