"""Methods of a training engine for its callers, written once for all places where it may run.

    class                                 how `call_engine` gets to the engine
    actors.cluster.clients.TrainerClient  calls the endpoint of that name on all ranks of a trainer
    actors.trainer.PolicyTrainer          in the actor, behind that endpoint: the engine's thread
    rl.local.LocalBackend                 a thread of this process

The `rl.tinker.backend.TinkerWorkers` of a Tinker server derive from the first or the last.

To follow a call, open the method of `TrainingEngine` that it names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from losses.types import Loss
from rl.trainer_types import ForwardBackwardResult, OptimParams, OptimStepResult
from rl.training.config import Dtype
from rl.training.engine import TrainingEngine
from rl.types import RUN, LoopPosition, TrainingSample

T = TypeVar("T")

FileUse = Literal["save", "load", "export"]


class EngineClient(ABC):
    """A `Trainer` (`rl.protocols`) with all methods of its engine.

    `model_id` is `RUN` for the one model of a run, and names one of several models in training.

    Example:
        >>> result = await client.forward_backward(samples, return_logprobs=True)
        >>> step = await client.optim_step(OptimParams(lr=1e-5))
        >>> step.policy_version
        1
    """

    @abstractmethod
    async def call_engine(
        self,
        method: Callable[..., T],
        *args: Any,
        model_id: str,
        files: FileUse | None = None,
        **options: Any,
    ) -> T:
        """Call a method of the engine of a model, and return its result.

        Over actors this happens twice: `TrainerClient.call_engine` calls the endpoint of the
        method's name on all ranks, where `PolicyTrainer.call_engine` calls the engine's method in
        its thread; rank 0 answers.

        Args:
            method: method of `TrainingEngine`; an engine's class may override it.
            files: use of files by the call, which may take longer than a computation.
        """

    # Methods are passed as functions, not by name: an editor and mypy follow them to the engine.

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        return_trained: bool | Sequence[int] = False,
        model_id: str = RUN,
    ) -> ForwardBackwardResult:
        return await self.call_engine(
            TrainingEngine.forward_backward,
            samples,
            loss=loss,
            return_logprobs=return_logprobs,
            return_trained=return_trained,
            model_id=model_id,
        )

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None, model_id: str = RUN
    ) -> ForwardBackwardResult:
        return await self.call_engine(TrainingEngine.forward, samples, loss=loss, model_id=model_id)

    async def drop_gradient(self, *, model_id: str = RUN) -> None:
        await self.call_engine(TrainingEngine.drop_gradient, model_id=model_id)

    async def optim_step(
        self,
        params: OptimParams | None = None,
        *,
        allow_empty: bool = False,
        model_id: str = RUN,
    ) -> OptimStepResult:
        return await self.call_engine(
            TrainingEngine.optim_step, params, allow_empty=allow_empty, model_id=model_id
        )

    async def compute_logprobs(
        self, samples: Sequence[TrainingSample], *, model_id: str = RUN
    ) -> list[np.ndarray]:
        return await self.call_engine(TrainingEngine.compute_logprobs, samples, model_id=model_id)

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample], *, model_id: str = RUN
    ) -> list[np.ndarray]:
        return await self.call_engine(
            TrainingEngine.compute_reference_logprobs, samples, model_id=model_id
        )

    # Calls that use files, for which actors have another deadline (`timeouts.checkpoint_s`)

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        model_id: str = RUN,
    ) -> None:
        await self.call_engine(
            TrainingEngine.save_checkpoint,
            folder,
            position=position,
            model_only=model_only,
            wait=wait,
            model_id=model_id,
            files="save",
        )

    async def load_checkpoint(
        self,
        folder: str,
        *,
        model_only: bool = False,
        exclude: Sequence[str] | None = None,
        model_id: str = RUN,
    ) -> int:
        return await self.call_engine(
            TrainingEngine.load_checkpoint,
            folder,
            model_only=model_only,
            exclude=exclude,
            model_id=model_id,
            files="load",
        )

    async def export_hf(
        self, folder: str, *, dtype: Dtype | None = None, model_id: str = RUN
    ) -> None:
        await self.call_engine(
            TrainingEngine.export_hf, folder, dtype=dtype, model_id=model_id, files="export"
        )

    async def save_adapter(self, folder: str, *, model_id: str = RUN) -> None:
        await self.call_engine(
            TrainingEngine.save_adapter, folder, model_id=model_id, files="export"
        )


def bind_method(
    engine: TrainingEngine, method: Callable[..., T], *args: Any, **options: Any
) -> Callable[[], T]:
    """Return the call of a method on this engine."""
    # By name: the engine of a custom trainer may override the method.
    return partial(getattr(engine, method.__name__), *args, **options)
