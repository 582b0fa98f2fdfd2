"""Tinker backend over actors on a small base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.config import Timeouts
from actors.generator import VLLMGenerator
from actors.tinker import ActorBackend, TinkerTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.weights.store import WeightStore
from tests.tinker.parts import CONTEXT, TRAINING, base_config


def actor_config(
    assets: Path,
    *,
    num_procs: int = 1,
    parallelism: ParallelismConfig | None = None,
    **base: Any,
) -> ActorBackend.Config:
    """Return a config; `base` are options of `base_config`."""
    return ActorBackend.Config(
        base=base_config(assets, **base),
        trainer=TinkerTrainer.Config(
            num_procs=num_procs, parallelism=parallelism or ParallelismConfig(), training=TRAINING
        ),
        generator=VLLMGenerator.Config(
            dtype="float32", max_model_len=CONTEXT, cpu_kv_cache_gib=0.05
        ),
        weights=WeightStore.Config(keep_versions=6),
        timeouts=Timeouts(close_s=10),
    )
