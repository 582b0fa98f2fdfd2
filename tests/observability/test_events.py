import json
import os

import pytest

from rl.observability.events import Events, read_events


def test_an_event_is_a_line_with_the_wall_clock_and_its_fields(tmp_path):
    events = Events(tmp_path / "events.jsonl", wall_clock=lambda: 1764000000.1234)
    events.add("lost", role="generator_0", reason="rank 0 of 1 is dead")
    events.add("recovered", role="generator_0", after_s=12.5)
    assert (tmp_path / "events.jsonl").read_text() == (
        '{"time": 1764000000.123, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 is dead"}\n'
        '{"time": 1764000000.123, "event": "recovered", "role": "generator_0", "after_s": 12.5}\n'
    )


@pytest.mark.parametrize(
    ("event", "fields", "message"),
    [
        ("lots", {}, "event='lots': must be one of started, resumed, lost"),
        ("lost", {"time": 3}, "every event gets the time"),
    ],
)
def test_an_event_that_does_not_exist_is_refused(tmp_path, event, fields, message):
    with pytest.raises(ValueError, match=message):
        Events(tmp_path / "events.jsonl").add(event, **fields)
    assert not (tmp_path / "events.jsonl").exists()


def test_events_of_a_second_start_follow_a_line_that_was_cut_short(tmp_path):
    file = tmp_path / "events.jsonl"
    Events(file, wall_clock=lambda: 1.0).add("started")
    with file.open("a") as torn:
        torn.write('{"time": 2.0, "eve')
    Events(file, wall_clock=lambda: 3.0).add("resumed", step=4)
    assert read_events(file) == [
        {"time": 1.0, "event": "started"},
        {"time": 3.0, "event": "resumed", "step": 4},
    ]
    assert read_events(tmp_path / "none.jsonl") == []


def test_a_value_without_a_place_in_json_is_told_as_text(tmp_path):
    file = tmp_path / "events.jsonl"
    Events(file, wall_clock=lambda: 1.0).add("stopped", reason=OSError("x"), after_s=float("nan"), step=None)
    told = {"time": 1.0, "event": "stopped", "reason": "x", "after_s": "nan", "step": None}
    assert json.loads(file.read_text()) == told


def test_a_disk_that_takes_nothing_is_told_once_and_ends_nothing(tmp_path, caplog):
    folder = tmp_path / "not a folder"
    folder.write_text("")
    events = Events(folder / "events.jsonl")
    events.add("started")
    events.add("finished")
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/events.jsonl: events are not written: [Errno 20] Not a directory: '{folder}/events.jsonl'"
    ]


def test_no_file_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    Events(tmp_path / "events.jsonl").add("started")
    assert os.listdir("/proc/self/fd") == before
