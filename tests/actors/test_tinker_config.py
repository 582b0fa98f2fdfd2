"""Configs of the Tinker backend's actors that are refused before a process starts."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import LaunchConfig
from actors.generator import VLLMGenerator
from actors.launch.launcher import Launcher
from actors.tinker import TinkerTrainer
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.models.spec import model_spec
from rl.weights.store import WeightStore
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
        (
            {"launch": LaunchConfig(trainer_hosts=2)},
            r"launch\.trainer_hosts=2: must be 1 with launch\.hosts='this'",
        ),
        ({"generator": generator(can_sleep=True)}, r"generator\.can_sleep=True: must be False"),
        (
            {"trainer": trainer(training=replace(TRAINING, cpu_offload=True))},
            r"training\.cpu_offload=True: must be False",
        ),
        (
            {"trainer": PolicyTrainer.Config(training=TRAINING)},
            r"trainer=PolicyTrainer\.Config: must be TinkerTrainer\.Config",
        ),
        (
            {
                "launch": LaunchConfig(hosts="slurm"),
                "weights": WeightStore.Config(transport="files"),
            },
            r"weights\.transport='files' with launch\.hosts='slurm' and log_folder=None: set "
            r"log_folder",
        ),
        (
            {
                "trainer": trainer(
                    num_procs=2, parallelism=ParallelismConfig(data_parallel_shard_degree=3)
                )
            },
            r"^trainer\.parallelism\.data_parallel_replicate_degree=1 .* does not multiply to the "
            r"world size",
        ),
        (
            {
                "trainer": trainer(
                    num_procs=4, parallelism=ParallelismConfig(tensor_parallel_degree=4)
                )
            },
            "tensor_parallel_degree=4 does not divide num_kv_heads=2: must be one of 1, 2",
        ),
        (
            {"generator": generator(max_model_len=65)},
            r"generator\.max_model_len=65 is more than the model's",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused_before_a_process_starts(config, fields, says):
    with pytest.raises(ValueError, match=says):
        asyncio.run(replace(config, **fields).build().start())
    assert Launcher.current is None


def test_gpus_need_generators_without_cuda_graphs(config, monkeypatch):
    monkeypatch.setattr("actors.tinker.trains_on_gpu", lambda launch, num_gpus: True)
    with pytest.raises(ValueError, match=r"enforce_eager=False with LoRA: must be True on a GPU"):
        asyncio.run(config.build().start())
    assert Launcher.current is None


def test_servers_with_one_log_folder_keep_their_weights_apart_and_remove_them(
    config, tmp_path, monkeypatch
):
    class NoActors:
        """Cluster and launcher that start nothing but the store."""

        current = None
        trainer = None
        pool = SimpleNamespace(members=[])
        network = "the actors use no network"

        def __init__(self, config=None, *, store=None, **_):
            self.launcher, self.config, self.store = self, config, store

        async def close(self): ...
        async def stop_all(self): ...

    async def start_cluster(config, *, store, **_):
        await store.start(None)
        return NoActors(config, store=store)

    monkeypatch.setattr("actors.tinker.Launcher", NoActors)
    monkeypatch.setattr("actors.tinker.start_cluster", start_cluster)
    logs = tmp_path / "logs"
    base: Any = SimpleNamespace(spec=model_spec("qwen3", "tiny"), folder=tmp_path)
    backend = replace(
        config, log_folder=str(logs), weights=WeightStore.Config(transport="files")
    ).build()

    def num_folders():
        return sum(path.is_dir() for path in logs.iterdir())

    async def main():
        servers = [await backend._start_workers(base) for _ in range(2)]
        assert num_folders() == 2
        for server in reversed(servers):  # each restores the TMPDIR that it found
            await server.aclose()

    asyncio.run(main())
    assert num_folders() == 0
