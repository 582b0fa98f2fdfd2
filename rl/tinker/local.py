"""The Tinker backend in this process, on one device, with PyTorch alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rl.config.tree import check_bounds
from rl.local import LocalBackend
from rl.tinker.backend import Base, TinkerBackend, Workers
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.utils.processes import use_threads


class LocalTinkerBackend(TinkerBackend):
    """LoRA models share the frozen weights of the base; samplers hold copies of the trained tensors only."""

    @dataclass(kw_only=True, slots=True)
    class Config(TinkerBackend.Config):
        training: TrainingConfig = field(default_factory=TrainingConfig)
        """Dtypes and micro-batch sizes of every model in training. Clipping is up to the client."""
        device: str | None = None
        """Device such as "cpu" or "cuda:0"; None: the GPU if there is one."""
        num_threads: int = 1
        """CPU threads of PyTorch's kernels, for training and for sampling each."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_threads", at_least=1)

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.config = config

    def _open_base(self) -> Base:
        config = self.config
        base: Base = config.base.build(training=config.training, cache=config.cache)
        return base

    async def _start_workers(self, base: Base) -> Workers:
        config = self.config

        def start() -> LocalBackend:
            return LocalBackend(
                TrainingEngine.Config(training=config.training),
                spec=base.spec,
                hf_assets_path=str(base.folder),
                device=config.device,
                models=True,
            )

        workers = await asyncio.to_thread(start)
        for thread in workers.threads.values():
            await thread.run(use_threads, config.num_threads)
        return workers
