"""What actors say of their machines, and what a run makes of it."""

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.calls import ActorCallError
from actors.limits import run_limits
from configs.sum_digits import tiny, tiny_async
from rl.machine_limits import MachineLimits, Workload

LIMITS = MachineLimits(device="a CPU", flops_per_s=2e11, memory_bytes_per_s=2e10, host_bytes_per_s=2e10)


@dataclass(kw_only=True)
class Group:
    """Answers as ranks do: the first with what its machine can do."""

    name: str
    asked: list[tuple[str, Workload]]
    is_lost: bool = False

    async def call(self, endpoint: str, *args: Any, limit: str) -> list[Any]:
        assert (endpoint, limit) == ("measure_machine", "setup_s")
        self.asked.append((self.name, args[0]))
        if self.is_lost:
            raise ActorCallError(f"{self.name}.{endpoint} failed")
        return [replace(LIMITS, device=self.name), None]


def limits_of(config, *, lost=""):
    """What a run of this config knows, and whom it asked for what."""
    asked: list[tuple[str, Workload]] = []
    names = ("trainer", "generator_0", "generator_1")
    trainer, *generators = (Group(name=name, asked=asked, is_lost=name == lost) for name in names)
    fleet: Any = SimpleNamespace(trainer=trainer, generators=generators)
    return asyncio.run(run_limits(config, fleet, spec=config.model)), asked


def test_trainer_and_generator_are_asked_one_after_the_other_for_their_own_workload():
    limits, asked = limits_of(tiny())
    assert limits is not None
    num_bytes = 779_328 * 4
    assert asked == [
        ("trainer", Workload(dtype="float32", num_bytes=num_bytes)),
        ("generator_0", Workload(dtype="float32", num_bytes=num_bytes)),
    ]
    assert (limits.trainer.device, limits.generator.device) == ("trainer", "generator_0")
    assert limits.sampled.parameters == 779_328
    assert (limits.itemsize, limits.num_samples, limits.waits_for_the_longest) == (4, 8, True)
    assert limits.most_running == 32 * 8


def test_ahead_of_training_more_completions_run_at_once_as_far_as_the_generators_let_them():
    config = tiny_async()
    config.generator.max_num_seqs = 100
    config.generator.num_replicas = 2
    limits, _ = limits_of(config)
    assert limits is not None
    assert (limits.most_running, limits.num_replicas, limits.waits_for_the_longest) == (100, 2, False)
    config.generator.max_num_seqs = 1000
    limits, _ = limits_of(config)
    assert limits is not None
    assert limits.most_running == 2 * 32 * 8 // 2


def test_who_shares_a_device_is_not_woken_for_it():
    config = tiny()
    config.launch.share_gpus = True
    limits, asked = limits_of(config)
    assert limits is not None
    assert limits.shares_devices
    assert [name for name, _ in asked] == ["trainer", "trainer"]


def test_nobody_is_asked_where_it_is_switched_off_and_what_fails_ends_no_run(caplog):
    config = tiny()
    config.limits.enable = False
    assert limits_of(config) == (None, [])
    limits, asked = limits_of(tiny(), lost="generator_0")
    assert limits is None
    assert len(asked) == 2
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said == (
        "what the machine can do is not known, so steps have no limit/: generator_0.measure_machine failed"
    )


@pytest.mark.parametrize(("num_procs", "num_threads", "most"), [(1, 2, 1), (64, 4, 16)])
def test_ranks_that_share_cores_count_as_far_as_there_are_cores(num_procs, num_threads, most):
    config = tiny()
    config.trainer.num_procs, config.trainer.num_threads = num_procs, num_threads
    config.trainer.parallelism.data_parallel_shard_degree = num_procs
    config.generator.num_replicas, config.generator.num_threads = num_procs, num_threads
    limits, _ = limits_of(config)
    assert limits is not None
    assert 1 <= limits.num_trainer_ranks <= most
    assert limits.num_generator_ranks == limits.num_trainer_ranks
