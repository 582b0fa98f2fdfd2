"""Implementations of `rl.protocols` by calls to actors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from actors.calls import ActorLostError, ActorTimeoutError
from actors.group import ActorGroup
from actors.recovery import RestartsUsedUpError
from rl.engine_client import EngineClient, FileUse
from rl.types import Completion, Rollout, SamplingParams, Score
from rl.utils.errors import RunError
from rl.utils.threads import all_or_cancel

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainerClient(EngineClient):
    """A `Trainer` over the ranks of a `PolicyTrainer`; rank 0 answers."""

    def __init__(self, trainer: ActorGroup) -> None:
        self.trainer = trainer

    async def call_engine(
        self,
        method: Callable[..., T],
        *args: Any,
        model_id: str,
        files: FileUse | None = None,
        **options: Any,
    ) -> T:
        """Call the endpoint of `PolicyTrainer` with the name of the engine's method."""
        answers = await self.trainer.call(
            method.__name__,
            *args,
            timeout="train_s" if files is None else "checkpoint_s",
            model_id=model_id,
            **options,
        )
        answer: T = answers[0]
        return answer

    async def finish_saving(self) -> None:
        # Another role may have the devices: a checkpoint is written from host memory.
        await self.trainer.call("finish_saving", needs_devices=False, timeout="checkpoint_s")


class GeneratorClient:
    """A `ResumableGenerator` over one `VLLMGenerator`; rank 0 of its tensor-parallel ranks
    answers.
    """

    def __init__(self, generator: ActorGroup) -> None:
        self.generator = generator
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        call_id = uuid.uuid4().hex
        try:
            answers = await self.generator.call(
                "generate",
                list(prompts),
                sampling=sampling,
                call_id=call_id,
                begun=begun,
                timeout="generate_s",
            )
        except (asyncio.CancelledError, ActorTimeoutError):
            # In the background: requests that cannot be aborted run to their end unobserved.
            ending = asyncio.create_task(self._end(call_id))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        return answers[0]

    async def abort(self) -> int:
        """End all completions of the generator, also those of other clients.

        A call that still waits for a shared device is not aborted.
        """
        num_ended, *_ = await self.generator.call(
            "abort", None, needs_devices=False, timeout="close_s"
        )
        return int(num_ended)

    async def _end(self, call_id: str) -> None:
        try:
            await self.generator.call("abort", [call_id], needs_devices=False, timeout="close_s")
        except RunError as error:
            logger.debug(
                "a call to %s that was given up was not ended: %s", self.generator.name, error
            )


class RewardClient:
    """A `Rewarder` over the processes of a `RewardActor`: each group goes to the process with the
    fewest rollouts.

    The run stops if an answer takes longer than `timeouts.score_s` and `longest_s` together: the
    time limits of the reward functions for a number of rollouts (`rl.rollouts.rewards.longest_s`).
    """

    def __init__(
        self,
        reward: ActorGroup,
        *,
        num_procs: int,
        longest_s: Callable[[int], float] = lambda num_rollouts: 0.0,
    ) -> None:
        self._reward = reward
        self._longest_s = longest_s
        self._num_asked = [0] * num_procs
        """Rollouts that each process has yet to score."""

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        return await all_or_cancel(self._score(group, alone=alone) for group in groups)

    async def _score(self, group: Sequence[Rollout], *, alone: bool) -> list[Score]:
        """Return the scores of one group; ask again after a restart if a process of the role is
        lost.
        """
        rank = self._num_asked.index(min(self._num_asked))
        self._num_asked[rank] += len(group)
        try:
            while True:
                try:
                    await self._reward.wait_until_up()
                except RestartsUsedUpError as error:
                    ids = ", ".join(dict.fromkeys(rollout.prompt.problem.id for rollout in group))
                    raise RestartsUsedUpError(
                        f"{error}; rollouts of {ids} were being scored"
                    ) from error
                # The process first scores what it was sent before, so all of its rollouts count.
                work_s = self._longest_s(self._num_asked[rank])
                try:
                    ((scores,),) = await self._reward.call(
                        "score", [group], alone, rank=rank, timeout="score_s", extra_s=work_s
                    )
                    return list(scores)
                except ActorLostError:
                    continue  # `wait_until_up` raises the loss if nothing is restarted.
        finally:
            self._num_asked[rank] -= len(group)
