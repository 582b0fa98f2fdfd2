"""One set of meshes for all tests of the weight store."""

from typing import Any

import pytest
import torch

from rl.weights.checksum import check_sums
from rl.weights.store import WeightStore
from tests.support.monarch_meshes import monarch_meshes
from tests.support.weight_actors import WeightActor


class Cluster:
    """Four trainer ranks with a volume each, two generator ranks, and a mesh with one volume."""

    def __init__(self, meshes, folder):
        self.meshes, self.transport = meshes, "auto"
        trainer_mesh = meshes.spawn_mesh(4)
        generator_mesh = meshes.spawn_mesh(2)
        self.volume_mesh = meshes.spawn_mesh(1, process_group=False)
        self.trainer = trainer_mesh.spawn("trainer", WeightActor)
        self.generator = generator_mesh.spawn("generator", WeightActor)
        meshes.run(self.trainer.setup.call())
        meshes.run(self.generator.setup.call())
        self._stores = {
            transport: self.start(trainer_mesh, folder, dtype="bfloat16", transport=transport)
            for transport in ("auto", "files")
        }
        self._last_version = 0
        self.use("auto")

    def use(self, transport):
        self.transport, self.bf16 = transport, self._stores[transport]

    def start(self, mesh, run_folder, *, dtype="float32", **config):
        settings: dict[str, Any] = {"timeout_s": 30, "transport": self.transport} | config
        store = WeightStore.Config(**settings).build(dtype=dtype, run_folder=run_folder)
        self.meshes.run(store.start(mesh))
        return store

    def next_version(self):
        self._last_version += 1
        return self._last_version

    def trainer_ranks(self, layout):
        num = {
            "fsdp_tp": 4,
            "pp_fsdp": 4,
            "hsdp": 4,
            "fsdp": 2,
            "ddp": 2,
            "ddp_dtensor": 2,
            "single": 1,
        }[layout]
        return self.trainer.slice(procs=slice(0, num))

    def push(self, store, layout, kind="uneven"):
        """Push a model whose seed is its version, and announce it; return the snapshot."""
        version = self.next_version()
        self.meshes.run(self.trainer.build.call(kind, layout, version, torch.float32))
        shards = self.meshes.run(self.trainer_ranks(layout).push.call(store, version))
        return store.announce([shard for _, shard in shards.items()])

    def pull(self, store, layout, snapshot, dtype, kind="uneven"):
        """Pull into a model of another seed, check weight parity, and return each rank's whole
        tensors.
        """
        self.meshes.run(self.generator.build.call(kind, layout, 999, dtype))
        ranks = self.generator if layout == "tp" else self.generator.slice(procs=0)
        received = self.meshes.run(ranks.pull.call(store, snapshot))
        pulled = [box for _, sums in received.items() for box in sums]
        check_sums(version=snapshot.version, pushed=snapshot.sums, pulled={"generator": pulled})
        answers = self.meshes.run(ranks.full.call())
        return [answer for _, answer in answers.items()]


@pytest.fixture(scope="package")
def all_transports(tmp_path_factory):
    with monarch_meshes() as meshes:
        yield Cluster(meshes, tmp_path_factory.mktemp("weights"))


@pytest.fixture
def cluster(all_transports, request):
    """The cluster with stores of one transport; shared memory unless parametrized."""
    all_transports.use(getattr(request, "param", "auto"))
    return all_transports
