"""Machine limits that actors measure, and how a run combines them."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from actors.calls import ActorCallError
from actors.config import Timeouts
from actors.run import run_limits
from configs.sum_digits import tiny
from rl.observability.machine import MachineLimits

LIMITS = MachineLimits(flops_per_s=2e11, memory_bytes_per_s=2e10, host_bytes_per_s=2e10)


@dataclass(kw_only=True)
class Group:
    """Fake group of ranks, of which the first answers with the limits of its machine."""

    timeouts: ClassVar[Timeouts] = Timeouts()
    name: str
    asked: list[tuple[Any, ...]]
    is_lost: bool = False

    async def call(self, endpoint: str, *args: Any) -> list[Any]:
        assert endpoint == "measure_machine"
        self.asked.append((self.name, *args))
        if self.is_lost:
            raise ActorCallError(f"{self.name}.{endpoint} failed")
        return [LIMITS, None]


def limits_of(config, *, lost=""):
    """Return the limits of a run of this config, and the calls that were made for them."""
    asked: list[tuple[Any, ...]] = []
    names = ("trainer", "generator_0", "generator_1")
    trainer, *generators = (Group(name=name, asked=asked, is_lost=name == lost) for name in names)
    fleet: Any = SimpleNamespace(trainer=trainer, pool=SimpleNamespace(members=generators))
    return asyncio.run(run_limits(config, fleet, spec=config.model)), asked


def test_trainer_and_generator_are_measured_in_turn_and_shared_devices_by_the_trainer_alone():
    limits, asked = limits_of(tiny())
    assert limits is not None
    num_bytes = 779_328 * 4
    assert asked == [
        ("trainer", "float32", num_bytes),
        ("generator_0", "float32", num_bytes),
    ]
    assert limits.sampled.parameters == 779_328
    assert (limits.itemsize, limits.num_samples, limits.waits_for_the_longest) == (4, 8, True)
    assert limits.most_running == 32 * 8
    config = tiny()
    config.launch.share_gpus = True
    limits, asked = limits_of(config)
    assert limits is not None
    assert limits.shares_devices
    assert [name for name, *_ in asked] == ["trainer", "trainer"]


def test_limits_can_be_disabled_and_a_failed_measurement_ends_no_run(caplog):
    config = tiny()
    config.limits.enable = False
    assert limits_of(config) == (None, [])
    limits, asked = limits_of(tiny(), lost="generator_0")
    assert limits is None
    assert len(asked) == 2
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said == (
        "the machine was not measured, so steps have no limit/ metrics: generator_0.measure_machine failed"
    )
