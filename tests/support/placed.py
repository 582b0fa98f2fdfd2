"""Placements without the rest of a run's config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.config import LaunchConfig
from actors.launch.placement import Placements, place_actors


def placed(
    launch: LaunchConfig,
    *,
    num_gpus: int = 0,
    trainer: int = 2,
    replicas: int = 1,
    degree: int = 1,
    reward: int = 1,
    trainer_threads: int = 1,
    generator_threads: int = 1,
) -> Placements:
    config: Any = SimpleNamespace(
        agents=None,
        launch=launch,
        trainer=SimpleNamespace(num_procs=trainer, num_threads=trainer_threads),
        generator=SimpleNamespace(
            num_replicas=replicas, tensor_parallel_degree=degree, num_threads=generator_threads
        ),
        reward=SimpleNamespace(num_procs=reward),
    )
    return place_actors(config, num_gpus=num_gpus)
