"""From a run's folder to what Perfetto opens."""

import json

import pytest

from rl import timeline as entry
from rl.observability.activity import STATE_FOLDER, Activity
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.observability.span_file import SPANS_FOLDER
from rl.observability.timeline import NoSpansError, write_timeline


def write_spans(logs, role, *spans, rank=0):
    """`spans`: name, start and end, and what else is said."""
    folder = logs / SPANS_FOLDER
    folder.mkdir(exist_ok=True)
    lines = [{"role": role, "rank": rank, "host": "h", "pid": 1}]
    lines += [{"name": n, "start_s": a, "end_s": b, "version": None} | said for n, a, b, said in spans]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{role}-{rank}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """A step of a trainer and a generator, from second 1000 on."""
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
    return {(e["name"], e["ts"]): e for e in events if e["ph"] == "X"}


def test_every_process_is_a_track_in_order_and_every_span_lies_in_it_by_microseconds(run):
    assert write_timeline(run.logs, run.timeline) == 7
    events = events_of(run.timeline)
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert tracks == {"controller[0]": 1, "trainer[0]": 2, "generator_0[0]": 3}
    gradient = slices(events)["forward_backward", 2_250_000.0]
    assert gradient == {
        "ph": "X", "pid": 2, "tid": 1, "name": "forward_backward", "cat": "forward_backward",
        "ts": 2_250_000.0, "dur": 1_000_000.0, "args": {"version": 4},
    }  # fmt: skip
    pull = slices(events)["pull", 3_500_000.0]
    assert (pull["cat"], pull["args"]) == ("pull", {"version": 5, "error": "ValueError: no"})
    # Within the step, on one lane; calls that overlap on two.
    assert {slices(events)[key]["tid"] for key in slices(events) if key[0].startswith("waits")} == {1}
    named = [e for e in events if e["name"] == "thread_name"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    assert lanes == {(1, 1): "main", (2, 1): "main", (3, 1): "main", (3, 2): "generate", (3, 3): "generate 2"}


def test_counters_are_calls_at_once_versions_and_the_numbers_of_steps(run):
    records = [
        {"step": 1, "eval/correct": 0.5},
        {"step": 1, "time/step_s": 4.0, "reward/mean": 0.25, "limit/idle": 0.5, "loss/mean": 1.0},
        {"step": 2, "time/step_s": 4.0, "reward/mean": 0.5},
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "rew')
    write_timeline(run.logs, run.timeline)
    counters = [
        (e["pid"], e["name"], e["ts"], e["args"]["value"]) for e in events_of(run.timeline) if e["ph"] == "C"
    ]
    assert counters == [
        (3, "generate at once", 250_000.0, 1),
        (3, "generate at once", 500_000.0, 2),
        (3, "generate at once", 1_500_000.0, 1),
        (3, "generate at once", 2_000_000.0, 0),
        (3, "policy version", 4_000_000.0, 5),
        (1, "reward/mean", 4_000_000.0, 0.25),
        (1, "limit/idle", 4_000_000.0, 0.5),
    ]


def test_what_goes_on_is_drawn_to_the_last_moment_that_is_known(run):
    activity = Activity()
    state = activity.start(run.logs / STATE_FOLDER, role="trainer", rank=0)
    activity.begin("optim_step", 4)
    activity.stop()
    record = json.loads(state.read_text())
    record["doing"][0]["oldest"]["since"] = 1003.75
    state.write_text(json.dumps(record))
    assert write_timeline(run.logs, run.timeline) == 8
    hanging = slices(events_of(run.timeline))["optim_step", 3_750_000.0]
    assert (hanging["pid"], hanging["dur"]) == (2, 250_000.0)
    assert hanging["args"] == {"version": 4, "unfinished": True}


def test_what_happened_to_the_run_is_a_mark_across_all_tracks(run):
    Events(run.events, wall_clock=lambda: 1002.5).add("lost", role="trainer", reason="dead")
    write_timeline(run.logs, run.timeline)
    (mark,) = [e for e in events_of(run.timeline) if e["ph"] == "i"]
    assert (mark["name"], mark["s"], mark["ts"]) == ("lost", "g", 2_500_000.0)
    assert mark["args"] == {"role": "trainer", "reason": "dead"}


@pytest.mark.parametrize("damage", [b"[]\n3\n{}\n", b"\xff\xfe\n"])
def test_what_is_no_event_is_left_out_and_the_first_one_is_the_beginning(run, damage):
    Events(run.events, wall_clock=lambda: 999.5).add("started")
    with run.events.open("ab") as file:
        file.write(damage)
    write_timeline(run.logs, run.timeline)
    events = events_of(run.timeline)
    assert min(e["ts"] for e in events if "ts" in e) == 0.0
    assert [e["name"] for e in events if e["ph"] == "i"] == ["started"]


def test_the_command_writes_into_the_runs_folder_or_where_it_is_told(run, tmp_path, capsys):
    assert entry.main([str(run.path)]) == 0
    said = f"{run.path}/timeline.json: 7 spans; open it at https://ui.perfetto.dev or in chrome://tracing\n"
    assert capsys.readouterr().out == said
    assert entry.main([str(run.path), "--output", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").read_text() == run.timeline.read_text()


def test_what_is_no_run_or_has_no_spans_or_no_room_is_said_with_status_2(run, tmp_path, capsys):
    assert entry.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is not the folder of a run: it has no status.json\n"
    with RunFolder.create(tmp_path, "silent") as silent:
        assert entry.main([str(silent.path)]) == 2
    assert f"error: {silent.logs} holds no spans: the run was made with timeline.enable=False" in (
        capsys.readouterr().err
    )
    assert entry.main([str(run.path), "--output", str(tmp_path / "no" / "where.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_an_earlier_timeline_stays_where_there_is_nothing_to_draw(tmp_path):
    file = tmp_path / "timeline.json"
    file.write_text("{}")
    with pytest.raises(NoSpansError, match="holds no spans"):
        write_timeline(tmp_path / "logs", file)
    assert file.read_text() == "{}"
