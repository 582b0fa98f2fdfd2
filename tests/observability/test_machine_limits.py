"""Measured limits of a machine, and their cache."""

import time
from dataclasses import replace

import pytest
import torch

from rl.distributed.runtime import use_threads
from rl.observability.machine_limits import MachineLimits, Workload, machine_limits, measured

CPU = torch.device("cpu")
WORKLOAD = Workload(dtype="float32", num_bytes=3_000_000)
LIMITS = MachineLimits(device="a CPU", flops_per_s=2e11, memory_bytes_per_s=2e10, host_bytes_per_s=2e10)


class Measures:
    """Fake measurement that counts its calls."""

    def __init__(self, *, is_quiet=True):
        self.is_quiet = is_quiet
        self.num_asked = 0

    def __call__(self, workload, device):
        self.num_asked += 1
        return LIMITS, self.is_quiet


def best_s(action, *, num=30):
    def timed():
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return min(timed() for _ in range(num))


def test_measured_rates_match_matrix_products_and_copies():
    use_threads(1)
    random_state = torch.get_rng_state()
    limits, _ = measured(WORKLOAD, CPU)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == 1
    a, b = torch.ones(2, 256, 256)
    flops = 2 * 256**3 / best_s(lambda: a @ b)
    # Other work may slow either down.
    assert flops / 30 < limits.flops_per_s < 30 * flops
    source, target = torch.ones(2, 524_288)  # two halves of 4 MiB, the power of two above 3 MB
    copied = source.nbytes * 2 / best_s(lambda: target.copy_(source))
    assert copied / 30 < limits.memory_bytes_per_s < 30 * copied
    assert limits.host_bytes_per_s == limits.memory_bytes_per_s


def test_limits_of_a_quiet_machine_are_cached(tmp_path):
    measure = Measures()
    first = machine_limits(WORKLOAD, device=CPU, cache=tmp_path / "cache", measure=measure)
    assert first == LIMITS
    assert machine_limits(WORKLOAD, device=CPU, cache=tmp_path / "cache", measure=measure) == first
    assert measure.num_asked == 1
    alike = replace(WORKLOAD, num_bytes=4_000_000)  # a workload with copies of 4 MiB too
    assert machine_limits(alike, device=CPU, cache=tmp_path / "cache", measure=measure) == first
    assert measure.num_asked == 1


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"num_bytes": 5_000_000}, {"threads": 2}])
def test_another_workload_is_measured_separately(tmp_path, other):
    measure = Measures()
    use_threads(1)
    machine_limits(WORKLOAD, device=CPU, cache=tmp_path, measure=measure)
    try:
        use_threads(other.pop("threads", 1))
        machine_limits(replace(WORKLOAD, **other), device=CPU, cache=tmp_path, measure=measure)
    finally:
        use_threads(1)
    assert measure.num_asked == 2


def test_limits_of_a_busy_machine_are_not_cached(tmp_path):
    measure = Measures(is_quiet=False)
    for _ in range(2):
        assert machine_limits(WORKLOAD, device=CPU, cache=tmp_path, measure=measure) == LIMITS
    assert measure.num_asked == 2
    assert list(tmp_path.iterdir()) == []


def test_cache_that_is_damaged_or_cannot_be_written_is_no_error(tmp_path):
    measure = Measures()
    first = machine_limits(WORKLOAD, device=CPU, cache=tmp_path, measure=measure)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert machine_limits(WORKLOAD, device=CPU, cache=tmp_path, measure=measure) == first
    assert machine_limits(WORKLOAD, device=CPU, cache=file / "x", measure=measure) == LIMITS
    assert measure.num_asked == 3
