"""DeviceLock over fakes, in virtual time."""

import asyncio
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.clients import GeneratorClient
from actors.cluster.group import ActorGroup
from actors.cluster.publisher import GeneratorPool
from actors.cluster.shared_devices import DeviceLock
from actors.config import Timeouts
from rl.types import BoxSum, SamplingParams
from rl.weights.store import Snapshot, WeightStore
from rl.weights.types import WeightParityError
from tests.support.mortal import shard_of
from tests.support.virtual_time import run_in_virtual_time


@dataclass
class Mesh:
    """Fake actors: each call takes a second and asserts that this side is awake."""

    name: str
    log: list[str]
    awake: bool
    corrupt_pull: int = 0
    """Number of the pull, from 1 on, that ends with bits other than the pushed ones."""
    weights: int | None = None
    num_pulls: int = 0

    def __getattr__(self, endpoint: str) -> Any:
        if endpoint.startswith("_"):
            raise AttributeError(endpoint)
        return SimpleNamespace(call=partial(self._call, endpoint))

    async def _call(self, endpoint: str, *args: Any, **options: Any) -> dict[str, Any]:
        self.log.append(f"{self.name}.{endpoint}")
        if endpoint in ("sleep", "wake"):
            assert self.awake == (endpoint == "sleep")
            self.awake = endpoint == "wake"
            self.weights = None
        elif endpoint != "abort":
            assert self.awake, f"{self.name} sleeps"
            assert endpoint != "generate" or self.weights is not None
        await asyncio.sleep(1)
        if endpoint != "pull_model_state_dict":
            return {"procs=0": self.weights}
        self.weights = args[0].version
        self.num_pulls += 1
        return {"procs=0": (sum_of(args[0].version + (self.num_pulls == self.corrupt_pull)),)}


def group(mesh: Mesh) -> ActorGroup:
    return ActorGroup(name=mesh.name, mesh=mesh, timeouts=Timeouts())


async def pull(generator: ActorGroup, version: int) -> None:
    await generator.call(
        "pull_model_state_dict", snapshot(version), pulls=version, timeout="sync_s"
    )


def sum_of(value: int) -> BoxSum:
    return BoxSum(
        name="w", dtype="float32", global_shape=(2,), offsets=(0,), shape=(2,), value=value
    )


def snapshot(version: int) -> Snapshot:
    return Snapshot(version=version, shards=(shard_of(version, sum_of(version)),))


def make(num_generators: int = 1, corrupt_pull: int = 0) -> tuple[DeviceLock, list[str]]:
    """Return a lock over a trainer that pushed version 7, and its log; the last generator may be
    corrupt.
    """
    log: list[str] = []
    generators = [Mesh(f"g{i}", log, awake=False) for i in range(num_generators)]
    generators[-1].corrupt_pull = corrupt_pull
    store = WeightStore.Config().build()
    store.announce(snapshot(7).shards)
    trainer = group(Mesh("t", log, awake=True))
    pool = GeneratorPool([], trainer=trainer, store=store)

    def pull(version: int, groups: Any) -> Any:
        return pool.pull_and_check(version, generators=groups)

    return DeviceLock(trainer=trainer, generators=[group(g) for g in generators], pull=pull), log


def run(coroutine: Any) -> Any:
    return run_in_virtual_time(coroutine)


def test_devices_change_sides_once_per_phase():
    async def main() -> list[str]:
        lock, log = make()
        for step in (1, 2):
            await lock.trainer.call("push_model_state_dict", timeout="sync_s")
            await pull(lock.generators[0], step)
            await lock.generators[0].call("generate", timeout="generate_s")
            await lock.trainer.call("forward_backward", timeout="train_s")
            await lock.trainer.call("optim_step", timeout="train_s")
        return log

    assert run(main())[0] == 2 * [
        "t.push_model_state_dict", "t.sleep", "g0.wake", "g0.pull_model_state_dict", "g0.generate",
        "g0.sleep", "t.wake", "t.forward_backward", "t.optim_step",
    ]  # fmt: skip


def test_second_pull_with_other_bits_names_generator_tensor_and_version():
    async def main() -> list[str]:
        lock, log = make(num_generators=2, corrupt_pull=2)
        await asyncio.gather(*(pull(g, 7) for g in lock.generators))
        await lock.trainer.call("save_checkpoint", timeout="checkpoint_s")
        log.clear()
        # The generators slept since their pull, and pull the same version again.
        with pytest.raises(
            WeightParityError, match=r"version 7: generator 'g1' holds other bits in 'w'"
        ):
            await lock.generators[0].call("generate", timeout="generate_s")
        return log

    pulls = ["g0.pull_model_state_dict", "g1.pull_model_state_dict"]
    assert run(main())[0] == ["t.sleep", "g0.wake", "g1.wake", *pulls]


def test_calls_of_one_side_overlap_and_the_other_side_waits_for_all_of_them():
    async def main() -> list[str]:
        lock, log = make()
        await pull(lock.generators[0], 1)
        log.clear()
        calls = [lock.generators[0].call("generate", timeout="generate_s") for _ in range(3)]
        await asyncio.gather(*calls, lock.trainer.call("forward_backward", timeout="train_s"))
        return log

    log, took_s = run(main())
    assert log == ["g0.generate"] * 3 + ["g0.sleep", "t.wake", "t.forward_backward"]
    # Switch to the generators, a pull, three calls at once, switch back, a gradient.
    assert took_s == 2 + 1 + 1 + 2 + 1


def test_cancelled_completion_ends_while_the_trainer_has_the_devices():
    async def main() -> list[str]:
        lock, log = make()
        await pull(lock.generators[0], 1)
        client = GeneratorClient(lock.generators[0])
        drawing = asyncio.create_task(client.generate([], sampling=SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.5)
        log.clear()
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        await lock.trainer.call("forward_backward", timeout="train_s")
        return log

    assert "g0.abort" in run(main())[0]
