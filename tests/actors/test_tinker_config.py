"""Configs of the Tinker backend's actors that are refused before a process starts."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actors.config import LaunchConfig
from actors.generator import VLLMGenerator
from actors.launch import Launcher
from actors.tinker import TinkerTrainer
from rl.distributed.mesh import ParallelismConfig
from tests.support.tinker_backends import actor_config
from tests.tinker.parts import TRAINING


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return actor_config(tmp_path_factory.mktemp("fleet") / "base")


def trainer(**fields):
    return TinkerTrainer.Config(**({"training": TRAINING} | fields))


def generator(**fields):
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "cpu_kv_cache_gib": 0.05}
    return VLLMGenerator.Config(**(settings | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"launch": LaunchConfig(share_gpus=True)}, r"launch\.share_gpus=True: must be False"),
        ({"generator": generator(can_sleep=True)}, r"generator\.can_sleep=True: must be False"),
        (
            {"trainer": trainer(training=replace(TRAINING, cpu_offload=True))},
            r"training\.cpu_offload=True: must be False",
        ),
        (
            {"trainer": trainer(num_procs=2, parallelism=ParallelismConfig(data_parallel_shard_degree=3))},
            r"^trainer\.parallelism\.data_parallel_replicate_degree=1 .* does not multiply to the world size",
        ),
        (
            {"trainer": trainer(num_procs=4, parallelism=ParallelismConfig(tensor_parallel_degree=4))},
            "tensor_parallel_degree=4 does not divide num_kv_heads=2",
        ),
        ({"generator": generator(max_model_len=65)}, r"generator\.max_model_len=65 is more than the model's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused_before_a_process_starts(config, fields, says):
    with pytest.raises(ValueError, match=says):
        asyncio.run(replace(config, **fields).build().start())
    assert Launcher.current is None
