from rl.observability.events import Events, read_events


def test_event_is_a_line_with_the_wall_clock_and_its_fields(tmp_path):
    events = Events(tmp_path / "events.jsonl", wall_clock=lambda: 1764000000.1234)
    events.add("lost", role="generator_0", reason="rank 0 of 1 is dead")
    events.add("recovered", role="generator_0", after_s=12.5)
    assert (tmp_path / "events.jsonl").read_text() == (
        '{"time": 1764000000.123, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 '
        'is dead"}\n{"time": 1764000000.123, "event": "recovered", "role": "generator_0", '
        '"after_s": 12.5}\n'
    )


def test_new_events_follow_an_unfinished_line(tmp_path):
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
