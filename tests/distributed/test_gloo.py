import pytest

from tests.distributed.gloo_ranks import AT_A_TIME, count_threads, gather_and_add
from tests.support.distributed import run_ranks


@pytest.mark.medium
@pytest.mark.parametrize(("interfaces", "num_devices"), [("", 1), ("lo,lo", 2)])
def test_every_group_has_one_worker_and_the_devices_asked_for(interfaces, num_devices):
    counted = run_ranks(count_threads, 4, interfaces, timeout_s=60)
    assert counted == [[(1, num_devices), (4, 4 * num_devices)]] * 4


@pytest.mark.medium
def test_heap_outlives_many_gathers_and_sums_at_a_time():
    """Two workers die of it in every second run, within some hundred rounds: `rl.distributed.gloo`."""
    num_rounds = 1000
    (sums,) = run_ranks(gather_and_add, 1, num_rounds, timeout_s=60)
    assert sums.shape == (num_rounds, AT_A_TIME)
    assert (sums == 4).all()
