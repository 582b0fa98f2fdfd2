"""Machine limits that actors measure, and how a run combines them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from actors.preflight.limits import measure_run_limits
from actors.run import _measure_limits
from configs.sum_digits import tiny
from rl.observability.machine import MachineLimits
from tests.support.mortal import Mortal

LIMITS = MachineLimits(flops_per_s=2e11, memory_bytes_per_s=2e10, host_bytes_per_s=2e10)


class Measured(Mortal):
    """Group that answers with the limits of its machine."""

    def __init__(self, name: str, asked: list[tuple[Any, ...]]) -> None:
        super().__init__(name)
        self.asked = asked

    async def answer(self, endpoint: str, *args: Any, **options: Any) -> Any:
        self.asked.append((self.name, *args))
        return await super().answer(endpoint, *args, **options)

    async def _measure_machine(self, dtype: str, num_bytes: int) -> MachineLimits:
        return LIMITS


def limits_of(config, *, lost=""):
    """Return the limits of a run of this config, and the calls that were made for them."""
    asked: list[tuple[Any, ...]] = []
    actors = [Measured(name, asked) for name in ("trainer", "generator_0", "generator_1")]
    for actor in actors:
        if actor.name == lost:
            actor.die()
    groups = [actor.group() for actor in actors]
    pool = SimpleNamespace(members=groups[1:])
    cluster: Any = SimpleNamespace(config=config, trainer=groups[0], pool=pool)
    measuring = measure_run_limits(
        cluster,
        spec=config.model,
        group_size=config.loop.group_size,
        groups_per_batch=config.loop.groups_per_batch,
        max_off_policy_steps=config.loop.max_off_policy_steps,
    )
    return asyncio.run(measuring), asked


def test_trainer_and_generator_are_measured_in_turn_unless_one_answer_holds_for_both():
    config = tiny()
    config.generator.num_threads = 1
    limits, asked = limits_of(config)
    assert limits is not None
    num_bytes = 779_328 * 4
    assert asked == [("trainer", "float32", num_bytes), ("generator_0", "float32", num_bytes)]
    assert limits.sampled.parameters == 779_328
    assert (limits.itemsize, limits.num_samples, limits.waits_for_the_longest) == (4, 8, True)
    assert limits.most_running == 32 * 8

    config.generator.num_threads = config.trainer.num_threads
    limits, asked = limits_of(config)
    assert limits is not None
    assert asked == [("trainer", "float32", num_bytes)]
    assert limits.trainer is limits.generator

    config.generator.dtype = "bfloat16"
    assert len(limits_of(config)[1]) == 2
    config.launch.share_gpus = True
    limits, asked = limits_of(config)
    assert limits is not None
    assert limits.shares_devices
    assert [name for name, *_ in asked] == ["trainer", "trainer"]


def test_run_without_limits_measures_nothing():
    config = tiny()
    config.limits.enable = False
    prepared: Any = SimpleNamespace(config=config)
    cluster: Any = SimpleNamespace()
    assert asyncio.run(_measure_limits(prepared, cluster)) is None


def test_failed_measurement_ends_no_run(caplog):
    config = tiny()
    config.generator.num_threads = 1
    limits, asked = limits_of(config, lost="generator_0")
    assert limits is None
    assert len(asked) == 2
    assert "steps have no limit/ metrics: generator_0.measure_machine failed" in caplog.text
