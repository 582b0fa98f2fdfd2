"""What one rank of a trainer does with models in training, for `tests/tinker/local/test_layout.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.distributed.shards import local_tensor
from rl.tinker.local.base import Base
from rl.tinker.local.layout import Layout
from rl.tinker.local.models import LocalModel
from rl.tinker.messages import LossCall
from rl.training.engine import TrainingEngine
from rl.training.place import Place
from tests.tinker.local.data_parts import random_data
from tests.tinker.local.local_parts import CPU, TRAINING, open_base, settings, train

PPO = LossCall(name="ppo")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """Of one rank."""

    logprobs: list[list[np.ndarray]]
    """Of each model: all of its steps."""
    num_shared: int
    """Frozen parameters of the second LoRA model that lie where the first one's do."""
    num_frozen: int
    group_is_left: bool


def layout_of(base: Base, parallelism: ParallelismConfig) -> Layout:
    world = World.from_env()
    config = TrainingEngine.Config(parallelism=parallelism)
    degrees = config.check(base.spec, world_size=world.size, device=CPU)
    place = Place.take(config, degrees=degrees, world=world, device=CPU, record_in=None)
    return Layout(config=config, world=world, place=place)


def two_steps(model: LocalModel) -> list[np.ndarray]:
    """Of one loss each, whose gradients need all tokens and all ranks."""
    first = train(model, random_data(5, seed=1))
    return first + train(model, random_data(5, seed=2, policy=True), call=PPO)


def life(assets: Path, folder: Path, parallelism: ParallelismConfig) -> Found:
    """Train, save, close and load models that share a process group."""
    base = open_base(assets)
    layout = layout_of(base, parallelism)
    one, other, full = (
        LocalModel(base, settings(rank), training=TRAINING, layout=layout) for rank in (4, 2, 0)
    )
    logprobs = [two_steps(one), two_steps(other), two_steps(full)]
    places = [addresses(model) for model in (one, other)]
    for name, model in (("lora", one), ("full", full)):
        if layout.world.rank == 0:
            (folder / name).mkdir()
        model.save_state(folder / name)
    one.close()
    full.close()
    dist.barrier()
    fresh = LocalModel(base, settings(4, seed=77), training=TRAINING, layout=layout)
    fresh.load_state(folder / "lora", optimizer=True)
    logprobs.append(two_steps(fresh))
    other.close()
    fresh.close()
    layout.place.leave()
    return Found(
        logprobs=logprobs,
        num_shared=sum(places[0][name] == place for name, place in places[1].items()),
        num_frozen=len(places[1]),
        group_is_left=not dist.is_initialized(),
    )


def addresses(model: LocalModel) -> dict[str, int]:
    """Where this rank's part of each frozen parameter lies."""
    return {
        name: local_tensor(parameter).untyped_storage().data_ptr()
        for name, parameter in model.engine.policy.parameters.items()
        if not parameter.requires_grad
    }
