"""Reward functions in a process: order, time limits, deaths, random states, start and end."""

import asyncio
import importlib
import multiprocessing
import os
import subprocess
import sys
import time

import psutil
import pytest

from rl.rollouts import rewards
from rl.rollouts.rubric import Criterion, Rubric
from rl.utils.errors import RunError
from rl.utils.processes import identify
from tests.support.scored import replied
from tests.support.scoring_functions import LIMIT_S, MIXED, RUBRIC, Driven, failure_of, never


@pytest.fixture(scope="module")
def driven():
    driven = Driven(RUBRIC)
    yield driven
    driven.close()


@pytest.fixture(scope="module")
def mixed():
    driven = Driven(MIXED)
    yield driven
    driven.close()


def failed(scores):
    return [s.failure is not None for s in scores]


def test_scores_come_in_order_with_weights_and_unweighted_parts(driven):
    """One of the functions runs an event loop of its own."""
    first, empty, second = driven.score([replied("own_loop"), replied("0.5")], [], [replied("0")])
    assert [s.reward for s in first] == [2.0, 1.0]
    assert first[1].parts == {"obey": 0.5}
    assert (empty, second[0].reward) == ([], 0.0)


@pytest.mark.parametrize("text", ["loop", "clear_the_alarm"])
def test_slow_function_fails_alone(driven, text):
    (scores,) = driven.score([replied("1"), replied(text), replied("1")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'obey' took longer than time_limit_s={LIMIT_S} on problem" in failure_of(
        scores[1]
    )
    assert "sum-digits/47-82" in failure_of(scores[1])


def test_time_of_a_call_begins_with_its_turn(driven, monkeypatch):
    monkeypatch.setattr(rewards, "GRACE_S", 0.1)
    process = driven.start()
    (scores,) = driven.score(
        [replied("wait_a_little")] * 6
    )  # 0.9 s together, beyond limit and grace
    assert not any(failed(scores))
    assert driven.start() is process


def test_process_that_left_a_child_with_its_socket_is_still_noticed(driven):
    (scores,) = driven.score([replied("fork_and_end"), replied("1")])
    assert "ended the reward process (exit code 5)" in failure_of(scores[0])
    assert scores[1].reward == 2.0


def test_alarm_that_a_function_leaves_behind_hits_no_other(driven):
    process = driven.start()
    (scores,) = driven.score([replied("set_an_alarm"), replied("wait_a_little")])
    assert [s.reward for s in scores] == [2.0, 2.0]
    assert driven.start() is process


@pytest.mark.parametrize("text", ["start_process", "use_pool"])
@pytest.mark.medium
def test_function_may_start_processes(driven, text, monkeypatch):
    monkeypatch.setattr(driven.rewards, "time_limit_s", 30.0)
    (scores,) = driven.score([replied(text)])
    assert (scores[0].failure, scores[0].reward) == (None, 2.0)


def written_pids(file, *, until_s=20.0):
    ends = time.monotonic() + until_s
    while not (file.exists() and len(file.read_text().split()) == 2):
        assert time.monotonic() < ends
        time.sleep(0.01)
    return [int(pid) for pid in file.read_text().split()]


def are_gone(pids, *, within_s=10.0):
    ends = time.monotonic() + within_s
    while any(identify(pid) is not None for pid in pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("leave_children", None),
        pytest.param(
            "leave_children_and_hang", "took longer than time_limit_s", marks=pytest.mark.medium
        ),
        ("leave_children_and_end", "ended the reward process (exit code -11)"),
    ],
)
def test_nothing_that_a_function_started_outlives_its_process(tmp_path, text, says):
    driven = Driven(RUBRIC)
    driven.start()
    driven.rewards.time_limit_s = 5.0 if says is None else 1.0
    (scores,) = driven.score([replied(text, question=str(tmp_path / "pids"))])
    assert says in failure_of(scores[0]) if says else scores[0].failure is None
    pids = written_pids(tmp_path / "pids")
    assert says or all(identify(pid) is not None for pid in pids)
    driven.close()
    assert are_gone(pids, within_s=0.0)


PARENT = """
import sys
if __name__ == "__main__":
    from tests.support.scored import replied
    from tests.support.scoring_functions import RUBRIC, Driven
    driven = Driven(RUBRIC)
    print(driven.start().pid, flush=True)
    driven.rewards.time_limit_s = 60.0
    driven.score([replied("leave_children_and_hang", question=sys.argv[1])])
"""


@pytest.mark.medium
def test_killed_parent_leaves_nothing_running(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "pids")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        assert parent.stdout is not None
        guard = psutil.Process(int(parent.stdout.readline()))
        pids = written_pids(tmp_path / "pids")
        pids += [process.pid for process in (guard, *guard.children(recursive=True))]
        parent.kill()
    assert len(set(pids)) == 4  # the worker runs in C and holds the interpreter's lock
    assert are_gone(pids)


def test_sigterm_for_all_processes_of_a_run_leaves_this_one_to_its_parent(driven):
    """The controller finishes its step then, for which it needs rewards."""
    process = driven.start()
    guard = psutil.Process(process.pid)
    below = guard.children()
    assert len(below) == 1
    subprocess.run(["kill", "-TERM", *(str(p.pid) for p in (guard, *below))], check=True)
    (scores,) = driven.score([replied("1"), replied("use_pool"), replied("1")])
    assert not any(failed(scores))
    assert driven.start().pid == process.pid
    assert guard.children() == below


def test_async_functions_of_several_calls_overlap(mixed):
    groups = mixed.score_each(*([replied("1", question="meet 4")] for _ in range(4)))
    assert [s.reward for (s,) in groups] == [111.0] * 4


@pytest.mark.medium
@pytest.mark.parametrize(
    ("guilty", "says"),
    [
        ({"question": "hang"}, f"reward 'later' took longer than time_limit_s={LIMIT_S}"),
        ({"text": "busy_in_c"}, f"reward 'obey' took longer than time_limit_s={LIMIT_S}"),
        ({"text": "end"}, "reward 'obey' ended the reward process (exit code 3)"),
    ],
)
def test_function_that_hangs_or_stops_the_whole_process_fails_alone(mixed, guilty, says):
    """Other calls are under way at the same time, and are repeated."""
    settings = {"text": "1"} | guilty
    bad = replied(settings.pop("text"), **settings)
    others = [replied(str(i), question="wait") for i in range(1, 5)]
    groups = mixed.score_each(others[:1], [bad, others[1]], others[2:])
    assert [[s.reward for s in scores] for scores in groups] == [
        [111.0],
        [0.0, 212.0],
        [213.0, 214.0],
    ]
    assert says in failure_of(groups[1][0])


def test_start_that_takes_too_long_names_its_option():
    driven = Driven(RUBRIC, start_timeout_s=0.01)
    with pytest.raises(
        TimeoutError, match=r"did not start within 0\.01 s \(reward\.start_timeout_s\)"
    ):
        driven.start()
    driven.close()


@pytest.mark.medium
def test_process_that_is_killed_while_it_loads_the_rubric_is_named_with_its_signal(
    tmp_path, monkeypatch
):
    source = (
        f"import os\nif os.getpid() != {os.getpid()}: os.kill(os.getpid(), 9)\ndef "
        "half(rollout): return 0.5\n"
    )
    (tmp_path / "dies_in_the_child.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("dies_in_the_child")
    driven = Driven(Rubric(criteria=(Criterion(name="half", function=module.half),), correct=never))
    with pytest.raises(RunError, match=r"ended while loading the rubric \(killed by SIGKILL\)"):
        driven.start()
    driven.close()
    del sys.modules[module.__name__]


@pytest.mark.medium
def test_rubric_that_cannot_be_loaded_is_an_error_and_leaves_no_process(tmp_path, monkeypatch):
    source = f"import os\nassert os.getpid() == {os.getpid()}\ndef half(rollout): return 0.5\n"
    (tmp_path / "loads_in_the_parent_alone.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("loads_in_the_parent_alone")
    before = set(multiprocessing.active_children())
    driven = Driven(Rubric(criteria=(Criterion(name="half", function=module.half),), correct=never))
    for start in (driven.start, lambda: driven.score([replied("1")])):
        with pytest.raises(
            RunError, match=r"the reward process cannot load the rubric: AssertionError\(\)"
        ):
            start()
    driven.close()
    assert set(multiprocessing.active_children()) == before
    del sys.modules[module.__name__]


def test_function_that_cannot_be_pickled_is_an_error():
    driven = Driven(Rubric(criteria=(Criterion(name="f", function=lambda r: 1.0),)))
    with pytest.raises(
        RunError, match=r"the rubric cannot be sent to the reward process .*top of a module"
    ):
        driven.start()
    driven.close()


def test_close_leaves_no_process_and_fails_pending_scores():
    driven = Driven(RUBRIC)

    async def close_meanwhile():
        waiting = asyncio.ensure_future(driven.rewards.score([[replied("loop"), replied("1")]]))
        await driven.rewards.start()
        await driven.rewards.close()
        await driven.rewards.close()
        with pytest.raises(RunError, match="the reward process was closed"):
            await waiting

    before = set(multiprocessing.active_children())
    driven.run(close_meanwhile())
    driven.runner.close()
    assert set(multiprocessing.active_children()) == before
