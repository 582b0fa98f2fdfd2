"""Implementations of `rl.protocols` by calls to actors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from actors.calls import ActorCallError, ActorGroup, ActorLostError, CallGroup, all_or_cancel
from actors.recovery import Role
from losses.types import Loss
from rl.models.converter import ModelConverter
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.config import Dtype
from rl.types import (
    RUN,
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    Rollout,
    SamplingParams,
    Score,
    TrainingSample,
)
from rl.utils.errors import RunError

logger = logging.getLogger(__name__)


class TrainerClient:
    """A `Trainer` over the ranks of a `PolicyTrainer`."""

    def __init__(self, trainer: CallGroup) -> None:
        self.trainer = trainer

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        model_id: str = RUN,
    ) -> ForwardBackwardResult:
        return await self._call("forward_backward", samples, loss, return_logprobs, model_id=model_id)

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None, model_id: str = RUN
    ) -> ForwardBackwardResult:
        """Return what `forward_backward` with logprobs would; the gradient stays as it is."""
        return await self._call("forward", samples, loss, model_id=model_id)

    async def drop_gradient(self, *, model_id: str = RUN) -> None:
        """Discard the gradient accumulated since the last step."""
        await self._call("drop_gradient", model_id=model_id)

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False, model_id: str = RUN
    ) -> OptimStepResult:
        """See `Trainer.optim_step`; with `allow_empty` the gradient is zero if nothing was accumulated."""
        return await self._call("optim_step", params, allow_empty, model_id=model_id)

    async def compute_logprobs(
        self, samples: Sequence[TrainingSample], *, model_id: str = RUN
    ) -> list[np.ndarray]:
        return await self._call("compute_logprobs", samples, model_id=model_id)

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._call("compute_reference_logprobs", samples)

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        await self._call("save_checkpoint", folder, position, model_only, wait)

    async def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        await self._call("finish_saving")

    async def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        """See `Trainer.load_checkpoint`; `exclude` None takes `checkpoint.exclude_from_loading`.

        Raises:
            DamagedCheckpointError: names the file; the trainer is as it was.
        """
        try:
            version: int = await self._call("load_checkpoint", folder, model_only, exclude)
        except ActorCallError as error:
            remote = getattr(error.__cause__, "exception", None)
            if isinstance(remote, DamagedCheckpointError):
                raise remote from error
            raise
        return version

    async def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write the weights as a Hugging Face folder; `dtype` None takes `checkpoint.export_dtype`."""
        await self._call("export_hf", folder, dtype)

    async def save_adapter(self, folder: str) -> None:
        """Write LoRA's adapters as a folder that PEFT opens."""
        await self._call("save_adapter", folder)

    # Models by id

    async def create_model(self, model_id: str, lora: ModelConverter.Config | None) -> None:
        await self.trainer.call("create_model", model_id, lora)

    async def delete_model(self, model_id: str) -> None:
        await self._call("delete_model", model_id)

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self._call("save_model", model_id, folder, optimizer)

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self._call("load_model", model_id, folder, optimizer)

    async def _call(self, endpoint: str, *args: Any, model_id: str = RUN) -> Any:
        # A run's trainer may be a class without models by id.
        named: dict[str, Any] = {} if model_id == RUN else {"model_id": model_id}
        return (await self.trainer.call(endpoint, *args, **named))[0]


class GeneratorClient:
    """A `ResumableGenerator` over one `VLLMGenerator`; rank 0 of its tensor-parallel ranks answers."""

    def __init__(self, generator: CallGroup) -> None:
        self.generator = generator
        self._running: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """See `ResumableGenerator.generate`; `session` makes no difference to a single generator."""
        call_id = uuid.uuid4().hex
        self._running.add(call_id)
        try:
            answers = await self.generator.call("generate", list(prompts), sampling, call_id, begun)
        except asyncio.CancelledError:
            # In the background: requests that cannot be aborted run to their end unobserved.
            ending = asyncio.create_task(self._end(call_id))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        finally:
            self._running.discard(call_id)
        return answers[0]

    async def abort(self) -> int:
        """See `ResumableGenerator.abort`; a call that still waits for a shared device is not aborted."""
        if not self._running:
            return 0
        num_ended, *_ = await self.generator.call("abort", sorted(self._running))
        return int(num_ended)

    async def _end(self, call_id: str) -> None:
        try:
            await self.generator.call("abort", [call_id])
        except RunError as error:
            logger.debug("a cancelled call to %s was not ended: %s", self.generator.name, error)


class RewardClient:
    """A `Rewarder` over the processes of a `RewardActor`: each group goes to the process with the fewest rollouts.

    Calls overlap. The run stops if an answer takes longer than `timeouts.score_s` and the time limits of the reward
    functions together.

    Args:
        num_procs: processes of the actor's mesh.
        longest_s: longest time that the reward functions of a number of rollouts may take in one process
            (`rl.rollouts.rewards.longest_s`). None: `timeouts.score_s` includes them.
    """

    def __init__(
        self,
        reward: ActorGroup | Role,
        *,
        num_procs: int,
        longest_s: Callable[[int], float] | None = None,
    ) -> None:
        self._longest_s = longest_s
        self._reward = reward if isinstance(reward, Role) else Role(reward)
        self._num_asked = [0] * num_procs
        """Rollouts that each process has yet to score."""

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        return await all_or_cancel(self._score(group, alone=alone) for group in groups)

    async def _score(self, group: Sequence[Rollout], *, alone: bool) -> list[Score]:
        """Return the scores of one group; ask again after a restart if a process of the role is lost."""
        rank = self._num_asked.index(min(self._num_asked))
        self._num_asked[rank] += len(group)
        try:
            while True:
                actors = await self._current(group)
                # The process first scores what it was sent before, so all of its rollouts count.
                work_s = 0.0 if self._longest_s is None else self._longest_s(self._num_asked[rank])
                try:
                    ((scores,),) = await actors.at_rank(rank).call("score", [group], alone, extra_s=work_s)
                    return list(scores)
                except ActorLostError as error:
                    self._reward.lose(actors, error)
        finally:
            self._num_asked[rank] -= len(group)

    async def _current(self, group: Sequence[Rollout]) -> ActorGroup:
        try:
            return await self._reward.current()
        except ActorLostError:
            raise
        except RunError as error:
            ids = ", ".join(dict.fromkeys(rollout.prompt.problem.id for rollout in group))
            raise RunError(f"{error}; rollouts of {ids} were being scored") from error
