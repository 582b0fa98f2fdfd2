"""The policy trainer: endpoints over the training engine, one actor a rank.

Extend it by subclassing: a subclass with its own `Config(PolicyTrainer.Config)` is what a
run spawns when its root config holds one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from monarch.actor import Actor, current_rank, endpoint

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.distributed.threads import use_threads
from rl.models.spec import ModelSpec
from rl.training.config import Dtype
from rl.training.engine import TrainingEngine
from rl.types import (
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    PushResult,
    TrainingSample,
)
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


class PolicyTrainer(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments; results are the same too."""

    @dataclass(kw_only=True, slots=True)
    class Config(TrainingEngine.Config):
        num_procs: int = 1
        """Ranks; the degrees of `parallelism` multiply to it."""
        num_threads: int = 1
        """CPU threads of each rank."""

        def __post_init__(self) -> None:
            if self.num_procs < 1 or self.num_threads < 1:
                raise ValueError(
                    f"num_procs={self.num_procs}, num_threads={self.num_threads}: both must be at least 1"
                )

    def __init__(
        self, *, config: Config, model_spec: ModelSpec, store: WeightStore, failure_folder: str
    ) -> None:
        """`failure_folder` receives the batch on which a loss was not finite."""
        use_threads(config.num_threads)
        self.config = config
        self.model_spec = model_spec
        self.store = store
        self.failure_folder = failure_folder

    def make_engine(self, hf_assets_path: str) -> TrainingEngine:
        """Join the process group, build the model in its layout and load the folder's weights."""
        return TrainingEngine(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            failure_folder=self.failure_folder,
        )

    @endpoint
    async def setup(self, hf_assets_path: str) -> None:
        """Make the engine from a Hugging Face folder."""
        self.engine = self.make_engine(hf_assets_path)
        num_bytes = sum(t.nbytes for t in self.engine.model_state_dict().values())
        logger.info("ready: %s %s, %.3g GB", self.model_spec.name, self.model_spec.flavor, num_bytes / 1e9)

    @endpoint
    async def forward_backward(
        self, samples: Sequence[TrainingSample], loss: Loss | None = None
    ) -> ForwardBackwardResult:
        return self.engine.forward_backward(samples, loss=loss)

    @endpoint
    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        return self.engine.optim_step(params)

    @endpoint
    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Rank 0 answers; the others take part and answer nothing."""
        logprobs = self.engine.compute_logprobs(samples)
        return logprobs if current_rank().rank == 0 else []

    @endpoint
    async def save_checkpoint(
        self,
        folder: str,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        self.engine.save_checkpoint(folder, position=position, model_only=model_only, wait=wait)

    @endpoint
    async def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        self.engine.checkpointer.wait()

    @endpoint
    async def load_checkpoint(self, folder: str, model_only: bool = False) -> int:
        return self.engine.load_checkpoint(folder, model_only=model_only)

    @endpoint
    async def export_hf(self, folder: str, dtype: Dtype | None = None) -> None:
        self.engine.export_hf(folder, dtype=dtype)

    @endpoint
    async def save_adapter(self, folder: str) -> None:
        self.engine.save_adapter(folder)

    @endpoint
    async def push_model_state_dict(self) -> PushResult:
        """Put this rank's shards into the store under the current version; not yet announced."""
        started = time.perf_counter()
        version = self.engine.policy_version
        num_bytes = await self.store.push(
            version=version,
            state_dict=self.engine.model_state_dict(),
            buffer_names=self.engine.buffer_names(),
        )
        return PushResult(policy_version=version, num_bytes=num_bytes, time_s=time.perf_counter() - started)

    @endpoint
    async def close(self) -> None:
        self.engine.close()
