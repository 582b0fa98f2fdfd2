import asyncio
import json
import os
import re
import time

import pytest

from rl.observability import activity as activity_module
from rl.observability.activity import RECORD_BYTES, Activity, doing, during
from rl.observability.process_state import read_state, read_states


@pytest.fixture
def this_process(tmp_path, monkeypatch):
    """The record of a process that does nothing yet: in a thread of this one what another test gave up may
    still be under way."""
    activity = Activity()
    monkeypatch.setattr(activity_module, "THIS_PROCESS", activity)
    yield activity.start(tmp_path / "state", role="trainer", rank=1)
    activity.stop()


def told(file):
    return [(d.what, d.num, d.version) for d in read_state(file).doing]


def test_what_is_under_way_is_told_oldest_first_and_gone_at_its_end(this_process):
    with doing("push", version=3):
        with doing("compute_logprobs"):
            assert told(this_process) == [("push", 1, 3), ("compute_logprobs", 1, None)]
        assert told(this_process) == [("push", 1, 3)]
    assert told(this_process) == []
    state = read_state(this_process)
    assert (state.name, state.process.pid, state.policy_version) == ("trainer[1]", os.getpid(), 3)
    assert state.is_here


def test_equal_activities_are_told_as_one_with_the_start_of_the_oldest(tmp_path):
    activity = Activity()
    file = activity.start(tmp_path, role="generator_0", rank=0)
    first = activity.begin("generate", 4)
    since = read_state(file).doing[0].since
    activity.begin("generate", 5)
    (both,) = read_state(file).doing
    assert (both.num, both.version, both.since) == (2, 4, since)
    activity.end("generate", first)
    (second,) = read_state(file).doing
    assert (second.num, second.version) == (1, 5)
    assert second.since.since_monotonic_s >= since.since_monotonic_s


def test_an_error_ends_the_activity_too_and_is_told_until_the_next(this_process):
    with pytest.raises(ValueError, match="too"), doing("load"):
        raise ValueError("too\n  large " + "." * 1000)
    assert told(this_process) == []
    failed = read_state(this_process).failed
    assert failed is not None
    assert failed.what == "load"
    assert failed.error == "ValueError: too large " + "." * (200 - len("ValueError: too large "))
    assert re.fullmatch(
        r"nothing for 0\.\d s; load failed 0\.\d s ago: ValueError: too large \.+",
        read_state(this_process).describe(),
    )
    with pytest.raises(asyncio.CancelledError), doing("push"):
        raise asyncio.CancelledError
    assert read_state(this_process).failed == failed


def test_the_record_keeps_its_size_however_much_goes_on(tmp_path):
    activity = Activity()
    file = activity.start(tmp_path, role="controller", rank=0)
    for number in range(100):
        activity.begin(f"wait number {number} " + "\N{GRINNING FACE}" * 200, number)
    activity.end("x", activity.begin("x", 99), ValueError("\N{GRINNING FACE}" * 1000))
    assert file.stat().st_size == RECORD_BYTES
    state = read_state(file)
    assert state.doing[0].what.startswith("wait number 0 ")
    assert 1 <= len(state.doing) <= 12
    assert state.policy_version == 99


def test_a_state_in_words_says_what_of_which_version_and_for_how_long(tmp_path):
    activity = Activity()
    file = activity.start(tmp_path, role="trainer", rank=0)
    assert read_state(file).describe() == "nothing for 0.0 s"
    activity.begin("generate", 12)
    activity.begin("generate", 12)
    activity.begin("score", None)
    assert read_state(file).describe() == "generate (2 times) of version 12 for 0.0 s, score for 0.0 s"


def test_a_clock_that_is_set_changes_no_duration_on_this_machine(tmp_path):
    activity = Activity()
    file = activity.start(tmp_path, role="trainer", rank=0)
    activity.begin("push", 1)
    record = json.loads(file.read_text())
    record["doing"][0]["oldest"]["since"] += 7200.0
    file.write_text(json.dumps(record))
    state = read_state(file)
    assert 0.0 <= state.ago_s(state.doing[0].since) < 60.0


def test_a_record_that_is_half_written_is_not_read(tmp_path):
    file = Activity().start(tmp_path, role="trainer", rank=0)
    record = json.loads(file.read_text())
    record["end"] += 1
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trainer-0\.json is no record of what a process is doing"):
        read_state(file)
    (tmp_path / "other.json").write_text("{")
    Activity().start(tmp_path, role="reward", rank=0)
    assert [state.name for state in read_states(tmp_path)] == ["reward[0]"]


def test_a_process_that_gets_another_name_is_told_under_that_alone(tmp_path):
    activity = Activity()
    activity.start(tmp_path, role="spare", rank=0)
    activity.start(tmp_path, role="generator_1", rank=0)
    assert [file.name for file in tmp_path.iterdir()] == ["generator_1-0.json"]


def test_whoever_asks_to_be_told_of_beginnings_is_called_within_the_activity(tmp_path):
    activity = Activity()
    file = activity.start(tmp_path, role="trainer", rank=0)
    seen = []
    activity.on_begin = lambda name: seen.append((name, told(file)))
    activity.begin("push", 2)
    assert seen == [("push", [("push", 1, 2)])]


class Holder:
    policy_version = 9

    @during("optim_step")
    async def step(self, file, *, by):
        return told(file), by


def test_a_method_is_told_with_the_version_of_its_object(this_process):
    assert asyncio.run(Holder().step(this_process, by=2)) == ([("optim_step", 1, 9)], 2)
    assert told(this_process) == []


def test_a_beginning_and_an_end_cost_less_than_20_microseconds(this_process):
    def batch():
        started = time.perf_counter()
        for _ in range(200):
            with doing("forward_backward", version=3):
                pass
        return (time.perf_counter() - started) / 200

    assert min(batch() for _ in range(30)) < 20e-6
