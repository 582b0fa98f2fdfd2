"""The timeline of a run's folder."""

import json

import pytest

from rl import timeline as entry
from rl.observability.events import Events
from rl.observability.run_folder import TIMELINE, RunFolder
from rl.observability.spans import SPANS_FOLDER, SpanRecorder
from rl.observability.timeline import write_timeline


def write_spans(logs, role, *spans, rank=0):
    """Write spans given as (name, start, end, further fields)."""
    folder = logs / SPANS_FOLDER
    folder.mkdir(exist_ok=True)
    lines = [
        {"ph": "X", "name": n, "ts": a * 1e6, "dur": (b - a) * 1e6, "args": said}
        for n, a, b, said in spans
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{role}-{rank}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """Write a step of a trainer and a generator that starts at second 1000."""
    with RunFolder.create(tmp_path, "run") as folder:
        write_spans(
            folder.logs,
            "controller",
            ("step 1", 1000.0, 1004.0, {}),
            ("waits for a batch", 1000.0, 1002.0, {}),
            ("waits for trainer.forward_backward", 1002.0, 1003.5, {}),
        )
        write_spans(folder.logs, "trainer", ("forward_backward", 1002.25, 1003.25, {"version": 4}))
        write_spans(
            folder.logs,
            "generator_0",
            ("generate", 1000.25, 1001.5, {"version": 4}),
            ("generate", 1000.5, 1002.0, {"version": 4}),
            ("pull", 1003.5, 1004.0, {"version": 5, "error": "ValueError: no"}),
        )
        yield folder


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


def slices(events):
    """Return the begin events by name and time, with durations from their end events."""
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    return {
        (e["name"], e["ts"]): e | {"dur": ends[e["id"]] - e["ts"]} for e in events if e["ph"] == "b"
    }


def test_every_process_is_a_track_with_its_spans(run):
    assert write_timeline(run.logs, run.path / TIMELINE) == 7
    events = events_of(run.path / TIMELINE)
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert tracks == {"controller[0]": 1, "trainer[0]": 2, "generator_0[0]": 3}
    gradient = slices(events)["forward_backward", 2_250_000.0]
    assert gradient == {
        "ph": "b", "pid": 2, "tid": 0, "id": gradient["id"], "name": "forward_backward",
        "cat": "forward_backward", "ts": 2_250_000.0, "dur": 1_000_000.0, "args": {"version": 4},
    }  # fmt: skip
    pull = slices(events)["pull", 3_500_000.0]
    assert (pull["cat"], pull["args"]) == ("pull", {"version": 5, "error": "ValueError: no"})
    assert len({e["id"] for e in slices(events).values()}) == 7  # spans of one name may overlap


def test_open_spans_end_at_the_last_known_time(run):
    activity = SpanRecorder()
    state = activity.start(run.logs, role="trainer", rank=0)
    activity.begin("optim_step", 4)
    activity.stop()
    record = json.loads(state.read_text())
    record["open"][0]["since_s"] = 1003.75
    state.write_text(json.dumps(record))
    assert write_timeline(run.logs, run.path / TIMELINE) == 8
    hanging = slices(events_of(run.path / TIMELINE))["optim_step", 3_750_000.0]
    assert (hanging["pid"], hanging["dur"]) == (2, 250_000.0)
    assert hanging["args"] == {"version": 4, "unfinished": True}


def test_events_are_marks_across_all_tracks(run):
    Events(run.events, wall_clock=lambda: 1002.5).add("lost", role="trainer", reason="dead")
    write_timeline(run.logs, run.path / TIMELINE)
    (mark,) = [e for e in events_of(run.path / TIMELINE) if e["ph"] == "i"]
    assert (mark["name"], mark["s"], mark["ts"]) == ("lost", "g", 2_500_000.0)
    assert mark["args"] == {"role": "trainer", "reason": "dead"}


def test_command_writes_the_timeline(run, tmp_path, capsys):
    assert entry.main([str(run.path)]) == 0
    said = f"{run.path}/timeline.json: 7 spans; open it at https://ui.perfetto.dev or in chrome://tracing\n"
    assert capsys.readouterr().out == said
    assert entry.main([str(run.path), "--output", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").read_text() == (run.path / TIMELINE).read_text()


def test_errors_of_the_command_have_status_2(run, tmp_path, capsys):
    with RunFolder.create(tmp_path, "silent") as silent:
        assert entry.main([str(silent.path)]) == 2
    assert f"error: {silent.logs} holds no spans: the run was made with timeline.enable=False" in (
        capsys.readouterr().err
    )
    assert entry.main([str(run.path), "--output", str(tmp_path / "no" / "where.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
