"""The number of compute threads follows the load."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from rl.utils import load
from rl.utils.load import Clocks, ComputeThreads, ThreadChoice, Window


def window_of(*, cores, waiting, amount=0.0):
    """Return a window of a second."""
    running = int(cores * 1e9)
    waiting_ns = int(running * waiting / (1 - waiting))
    return Window(worked_s=1.0, running=running, waiting=waiting_ns, amount=amount, amount_s=1.0)


CALM = window_of(cores=1.9, waiting=0.02)
CROWDED = window_of(cores=0.9, waiting=0.4)
"""Two threads that get less than a core; one thread would get as much."""


def run_windows(choice, machine, *, num_windows):
    """Return the numbers of threads of the windows, each of which the machine answers."""
    counts = []
    for _ in range(num_windows):
        counts.append(choice.count)
        choice.end_window(machine(choice.count))
    return counts


def test_calm_machine_keeps_all_threads():
    assert set(run_windows(ThreadChoice(2), lambda _: CALM, num_windows=50)) == {2}


def test_crowded_machine_gets_one_thread_and_is_asked_again_less_and_less_often():
    alone = window_of(cores=0.85, waiting=0.3)
    counts = run_windows(
        ThreadChoice(2), lambda count: CROWDED if count == 2 else alone, num_windows=100
    )
    assert counts[:3] == [2, 2, 1]
    trials = [i for i, count in enumerate(counts) if count == 2][2:]
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 2 * load.SHORTEST_PAUSE + 2
    assert gaps[-1] == load.LONGEST_PAUSE + 2
    assert len(trials) < 6


def test_several_threads_stay_where_they_get_more_done_than_one():
    # Large products: two threads beside two processes get a core together, one gets two thirds.
    machine = {2: window_of(cores=1.0, waiting=0.5), 1: window_of(cores=0.66, waiting=0.33)}
    counts = run_windows(ThreadChoice(2), machine.__getitem__, num_windows=100)
    assert 90 < counts.count(2) < 100


@pytest.mark.parametrize(("tokens_of_one", "best"), [(1000, 1), (600, 2)])
def test_what_was_done_counts_more_than_the_processor_time_it_took(tokens_of_one, best):
    machine = {
        2: window_of(cores=1.0, waiting=0.5, amount=800),
        1: window_of(cores=0.8, waiting=0.33, amount=tokens_of_one),
    }
    counts = run_windows(ThreadChoice(2), machine.__getitem__, num_windows=100)
    assert 90 < counts.count(best) < 100


def test_window_in_which_the_load_began_is_not_compared():
    # Half of it was calm, so that one thread beside the load cannot reach it.
    windows = iter([CALM, window_of(cores=1.4, waiting=0.25)])
    machine = {2: CROWDED, 1: window_of(cores=0.85, waiting=0.3)}
    counts = run_windows(
        ThreadChoice(2), lambda count: next(windows, machine[count]), num_windows=12
    )
    assert counts == [2, 2, 2] + [1] * 9


def test_threads_come_back_when_the_other_work_ends():
    choice = ThreadChoice(2)
    run_windows(choice, lambda count: CROWDED if count == 2 else CALM, num_windows=3)
    assert choice.count == 1
    machine = {2: CALM, 1: window_of(cores=1.0, waiting=0.0)}
    counts = run_windows(choice, machine.__getitem__, num_windows=20)
    assert counts[-1] == 2


class Machine:
    """Counters of a process whose threads wait half of their time."""

    def __init__(self, monkeypatch):
        self.now_s, self.waited_s, self.wait_share = 0.0, 0.0, 1.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def read(self):
        return Clocks(running=int(self.now_s * 1e9), waiting=int(self.waited_s * 1e9))

    def compute(self, threads, seconds=load.WINDOW_S, amount=0.0):
        with threads.work(amount):
            self.now_s += seconds
            self.waited_s += self.wait_share * seconds
            return torch.get_num_threads()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_work_is_done_with_the_chosen_number_and_the_rest_with_all(monkeypatch):
    machine = Machine(monkeypatch)
    threads = ComputeThreads(2, is_safe=lambda: True, read_clocks=machine.read)
    assert [machine.compute(threads) for _ in range(4)] == [2, 2, 1, 1]
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads.work():
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("is_safe", [None, lambda: False, lambda: 1 / 0])
def test_number_does_not_change_where_results_would(monkeypatch, is_safe):
    machine = Machine(monkeypatch)
    threads = ComputeThreads(2, is_safe=is_safe, read_clocks=machine.read)
    assert [machine.compute(threads) for _ in range(4)] == [2, 2, 2, 2]


@pytest.mark.usefixtures("two_threads")
def test_machine_without_the_counters_keeps_all_threads(monkeypatch):
    machine = Machine(monkeypatch)
    threads = ComputeThreads(2, is_safe=lambda: True, read_clocks=lambda: None)
    assert [machine.compute(threads) for _ in range(4)] == [2, 2, 2, 2]


@pytest.mark.usefixtures("two_threads")
def test_what_is_counted_outside_of_the_work_decides_nothing(monkeypatch):
    machine = Machine(monkeypatch)
    machine.wait_share = 0.0
    asked: list[bool] = []

    def is_safe():
        asked.append(True)
        return True

    threads = ComputeThreads(2, is_safe=is_safe, read_clocks=machine.read)
    # A start-up, and pauses, in which threads wait; in the work they do not.
    for _ in range(20):
        machine.now_s += 10.0
        machine.waited_s += 10.0
        assert machine.compute(threads) == 2
    assert not asked


@pytest.mark.usefixtures("two_threads")
def test_many_short_steps_make_a_window(monkeypatch):
    machine = Machine(monkeypatch)
    threads = ComputeThreads(2, is_safe=lambda: True, read_clocks=machine.read)
    counts = [machine.compute(threads, seconds=0.004) for _ in range(400)]
    assert counts.index(1) * 0.004 == pytest.approx(2 * load.WINDOW_S, abs=2 * load.STRETCH_S)


@pytest.mark.usefixtures("two_threads")
def test_amount_is_compared_by_the_time_of_its_own_work(monkeypatch):
    windows = []
    monkeypatch.setattr(ThreadChoice, "end_window", lambda _, window: windows.append(window))
    machine = Machine(monkeypatch)
    threads = ComputeThreads(2, is_safe=lambda: True, read_clocks=machine.read)
    for _ in range(4):
        # Too short for a reading of its own.
        machine.compute(threads, seconds=0.06)
        machine.compute(threads, seconds=0.2, amount=100)
        with pytest.raises(ZeroDivisionError), threads.work(1e6):
            1 / 0  # noqa: B018
    assert len(windows) == 2
    assert [w.amount / w.amount_s for w in windows] == pytest.approx([500, 500])


CLOCKS = """
from rl.utils.load import read_clocks
before = read_clocks()
sum(range(5_000_000))
after = read_clocks()
print(after.running - before.running, after.waiting - before.waiting)
"""


def test_clocks_of_a_process_run():
    # Without other threads, whose end would take their part out of the sum.
    run = subprocess.run(
        [sys.executable, "-c", CLOCKS], capture_output=True, text=True, timeout=60, check=True
    )
    running, waiting = map(int, run.stdout.split())
    assert 10_000_000 < running < 10_000_000_000
    assert waiting >= 0
