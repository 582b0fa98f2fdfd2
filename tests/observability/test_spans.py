"""Open and ended spans, from the recorder to the reader."""

import asyncio
import json
import os
import re
import time

import pytest

from rl.observability import spans as spans_module
from rl.observability.spans import (
    STATE_BYTES,
    SpanRecorder,
    TimelineConfig,
    add_error_context,
    read_state,
    read_states,
    span,
)
from rl.observability.timeline import read_spans
from rl.utils.errors import RunError
from rl.utils.files import BoundedFile
from tests.support.forked import answer_in_fork, limit_files


@pytest.fixture
def this_process(tmp_path, monkeypatch):
    """Return the state file of a new recorder that `span` uses; threads of other tests may still
    use the old one."""
    recorder = SpanRecorder()
    monkeypatch.setattr(spans_module, "RECORDER", recorder)
    yield recorder.start(tmp_path, role="trainer", rank=1)
    recorder.stop()


def open_spans(file):
    return [
        (open_span.name, open_span.num, open_span.version) for open_span in read_state(file).open
    ]


def span_log(logs, *, role="trainer", rank=0, max_bytes=1 << 20):
    (logs / "spans").mkdir(exist_ok=True)
    return BoundedFile(logs / "spans" / f"{role}-{rank}.jsonl", max_bytes=max_bytes)


def add(log, name, *, start_s=1.0, end_s=2.0):
    event = {
        "ph": "X",
        "name": name,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": {},
    }
    log.append(json.dumps(event) + "\n")


def names(logs):
    return [ended.name for ended in read_spans(logs)]


# Open spans


def test_open_spans_are_listed_oldest_first_until_they_end(this_process):
    with span("push", version=3):
        with span("compute_logprobs"):
            assert open_spans(this_process) == [("push", 1, 3), ("compute_logprobs", 1, None)]
        assert open_spans(this_process) == [("push", 1, 3)]
    with span("push", version=4), span("push", version=5):  # one name: the oldest counts
        assert open_spans(this_process) == [("push", 2, 4)]
    state = read_state(this_process)
    assert (state.name, state.process.pid, state.policy_version) == ("trainer[1]", os.getpid(), 5)
    assert state.is_here


def test_error_ends_the_span_and_is_shown_until_the_next_error(this_process):
    with pytest.raises(ValueError, match="too"), span("load"):
        raise ValueError("too\n  large " + "." * 1000)
    state = read_state(this_process)
    assert state.open == ()
    assert state.failed is not None
    assert state.failed.name == "load"
    assert state.failed.error == "ValueError: too large " + "." * (
        200 - len("ValueError: too large ")
    )
    assert re.fullmatch(
        r"idle for 0\.\d s; load failed 0\.\d s ago: ValueError: too large \.+", state.describe()
    )
    with pytest.raises(asyncio.CancelledError), span("push"):
        raise asyncio.CancelledError
    assert read_state(this_process).failed == state.failed


def test_state_file_keeps_its_size(tmp_path):
    recorder = SpanRecorder()
    file = recorder.start(tmp_path, role="controller", rank=0)
    for number in range(100):
        recorder.begin(f'wait number {number} "\\ ' + "\N{GRINNING FACE}" * 200, number)
    recorder.end("x", recorder.begin("x", 99), ValueError("\N{GRINNING FACE}" * 1000))
    assert file.stat().st_size == STATE_BYTES
    state = read_state(file)
    assert state.open[0].name.startswith('wait number 0 "\\ \N{GRINNING FACE}')
    assert 1 <= len(state.open) <= 12
    assert state.policy_version == 99


def test_change_of_the_wall_clock_changes_no_duration(tmp_path):
    looks = iter([time.time() + 3600.0])  # reading the clock again would fail
    recorder = SpanRecorder(wall_clock=lambda: next(looks))
    file = recorder.start(tmp_path, role="trainer", rank=0, timeline=TimelineConfig())
    number = recorder.begin("push", 1)
    state = read_state(file)
    assert 0.0 <= state.get_age_s(state.open[0].since_s) < 60.0
    recorder.end("push", number)
    (ended,) = read_spans(tmp_path)
    assert 0.0 <= ended.duration_s < 60.0
    assert ended.end_s == pytest.approx(time.time() + 3600.0, abs=60.0)


def test_half_written_state_is_not_read(tmp_path):
    file = SpanRecorder().start(tmp_path, role="trainer", rank=0)
    record = json.loads(file.read_text())
    record["end"] += 1
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trainer-0\.json is not the state file of a process"):
        read_state(file)
    (file.parent / "other.json").write_text("{")
    SpanRecorder().start(tmp_path, role="reward", rank=0)
    assert [state.name for state in read_states(tmp_path)] == ["reward[0]"]


def test_decorated_method_records_the_policy_version_of_its_object(this_process):
    class Trainer:
        policy_version = 9

        @span("optim_step")
        async def step(self, file, *, by):
            return open_spans(file), by

    assert asyncio.run(Trainer().step(this_process, by=2)) == ([("optim_step", 1, 9)], 2)
    assert open_spans(this_process) == []


# Ended spans


def test_ended_spans_are_read_back_by_start_with_process_version_and_error(tmp_path):
    recorder = SpanRecorder(log=span_log(tmp_path, role="generator_1", rank=2))
    before = time.time()
    step = recorder.begin("step 3", None)
    push = recorder.begin("push", 7)
    recorder.end("push", push, ValueError("too\n large"))
    recorder.end("step 3", step)
    after = time.time()
    outer, inner = read_spans(tmp_path)
    assert (outer.name, outer.version, outer.error) == ("step 3", None, None)
    assert (inner.name, inner.version, inner.error) == ("push", 7, "ValueError: too large")
    assert (inner.process, inner.role, inner.rank) == ("generator_1[2]", "generator_1", 2)
    times = [before - 0.01, outer.start_s, inner.start_s, inner.end_s, outer.end_s, after + 0.01]
    assert times == sorted(times)


def test_damaged_lines_are_skipped_and_the_next_process_continues_the_file(tmp_path):
    log = span_log(tmp_path)
    add(log, "push")
    path = tmp_path / "spans" / "trainer-0.jsonl"
    with path.open("ab") as torn:
        torn.write(b'[]\n3\n{"name": "push"}\n\xff\n{"name": "forward_backward", "ts": 17640')
    assert names(tmp_path) == ["push"]
    add(span_log(tmp_path), "load", start_s=3.0, end_s=4.0)
    assert names(tmp_path) == ["push", "load"]


def test_reading_within_a_limit_keeps_the_newest_spans_of_each_process(tmp_path):
    for role in ("trainer", "generator_0"):
        log = span_log(tmp_path, role=role, max_bytes=40_000)
        for number in range(1000):
            add(log, f"step {number}", start_s=number, end_s=number + 0.5)
        log.close()
    everything = names(tmp_path)
    for max_bytes in (80_000, 50_000, 20_000, 1_000):
        kept = [ended.name for ended in read_spans(tmp_path, max_bytes=max_bytes)]
        assert kept == everything[len(everything) - len(kept) :]
        assert (
            min(len(everything), max_bytes / 100) <= len(kept) <= max_bytes / 60
        )  # a line has about 75 bytes


def test_bound_of_a_file_counts_bytes(tmp_path):
    log = span_log(tmp_path, max_bytes=20_000)
    for _ in range(100):
        log.append("\u6570" * 100 + "\n")
    log.close()
    assert sum(file.stat().st_size for file in (tmp_path / "spans").iterdir()) <= 20_000


def test_full_disk_loses_only_spans(tmp_path):
    def act():
        recorder = SpanRecorder(log=span_log(tmp_path))
        for name in ("setup", "load", "lost", "lost", "push"):
            if name == "lost":
                limit_files(0)
            recorder.end(name, recorder.begin(name, 5))
            limit_files()

    answer_in_fork(act)
    assert names(tmp_path) == ["setup", "load", "push"]


def test_a_run_error_names_the_innermost_position():
    with (
        pytest.raises(RunError, match=r"^step 3: no good$"),
        add_error_context("run"),
        add_error_context("step 3"),
    ):
        raise RunError("no good")


def test_other_errors_get_the_positions_as_notes():
    with (
        pytest.raises(KeyError, match="'x'") as raised,
        add_error_context("run"),
        add_error_context("step 3"),
    ):
        raise KeyError("x")
    assert raised.value.__notes__ == ["step 3", "run"]
