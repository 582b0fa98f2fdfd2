"""The table of runs: what is read of each folder, and what becomes of folders that are no runs."""

import json
import os
import re
import time

import pytest

from relay import run_table, runs
from rl.observability.spans import SpanRecorder
from tests.support.report_runs import START_S, MadeRun, make_run

NOW_S = START_S + 1000


def summarize(folder):
    return run_table.summarize_run(folder, wall_clock_s=NOW_S)


def test_finished_run_is_summarized(tmp_path):
    run = summarize(make_run(tmp_path / "try-1", MadeRun(num_steps=40)))
    records = [json.loads(line) for line in (tmp_path / "try-1/metrics.jsonl").open()]
    evaluations = [r["eval/correct"] for r in records if "eval/correct" in r]
    rewards = [r["reward/mean"] for r in records if "reward/mean" in r]
    assert (run.name, run.task, run.state) == ("try-1", "no_such_module.tiny", "finished")
    assert (run.num_done, run.num_planned) == (40, 40)
    assert (run.first_evaluation, run.last_evaluation) == (evaluations[0], evaluations[-1])
    assert run.last_reward == rewards[-1]
    assert (run.started_s, run.duration_s) == (START_S, 80)


def test_state_follows_from_events_and_the_controller(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=3, status="running"))
    assert summarize(folder).state == "unknown"
    recorder = SpanRecorder()
    record = recorder.start(folder / "logs", role="controller", rank=0)
    recorder.stop()
    assert summarize(folder).state == "running"
    assert summarize(folder).duration_s == NOW_S - START_S
    record.write_text(re.sub(r'"start_ticks": \d+', '"start_ticks": 1', record.read_text()))
    assert summarize(folder).state == "killed"
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": START_S + 50, "event": "stopped", "reason": "x"}) + "\n")
    assert summarize(folder).state == "stopped"
    assert summarize(folder).duration_s == 50


def test_time_between_an_end_and_a_resumption_does_not_count(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=3))
    lines = [
        {"time": START_S, "event": "started"},
        {"time": START_S + 10, "event": "stopped", "reason": "Ctrl-C"},
        {"time": START_S + 500, "event": "resumed", "step": 2},
        {"time": START_S + 530, "event": "finished"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(folder).duration_s == 40


def test_damaged_files_leave_their_columns_empty(tmp_path, capsys):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=5))
    for name in ("config.json", "events.jsonl"):
        (folder / name).write_text('{"module": ')
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40] + '\n{"step": "no"}\n[1]\n\x00\xff')
    run = summarize(folder)
    assert (run.task, run.num_planned, run.duration_s) == (None, None, None)
    assert run.num_done == 4  # the last line is cut off
    assert run.last_reward is not None
    metrics.unlink()
    metrics.symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").symlink_to(tmp_path / "pipe")
    assert summarize(folder).num_done == 0
    assert runs.main([str(tmp_path)]) == 0
    assert "?" in capsys.readouterr().out


def test_evaluations_far_from_the_ends_of_a_long_file_are_found(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=3))
    filler = "x" * 2000
    lines: list[dict[str, object]] = [{"step": 0, "eval/correct": 0.25}]
    lines += [{"step": step, "reward/mean": step / 1000, "note": filler} for step in range(1, 500)]
    lines.insert(200, {"step": 199, "eval/correct": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = summarize(folder)
    assert (run.first_evaluation, run.last_evaluation) == (0.25, 0.5)
    assert (run.num_done, run.last_reward) == (499, 0.499)


def test_runs_are_found_once_below_a_folder_among_other_things(tmp_path, capsys):
    outputs = tmp_path / "my outputs"
    make_run(outputs / "a", MadeRun(num_steps=2))
    make_run(outputs / "sweeps" / "b", MadeRun(num_steps=2))
    (outputs / "latest").symlink_to(outputs / "a")
    (outputs / "around").symlink_to(tmp_path)
    for other in ("starting_points/x", "model", ".hidden"):
        (outputs / other).mkdir(parents=True)
    (outputs / "model" / "config.json").write_text('{"model_type": "llama"}')
    (outputs / "try.sweep.json").write_text("{}")
    assert runs.main([str(outputs), str(outputs / "a"), "--json", "--sort", "name"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["a", "sweeps/b"]
    assert rows[0]["folder"] == str(outputs / "a")
    assert runs.main([str(outputs / "a")]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "task", "steps"]
    assert line.startswith("a    no_such_module.tiny    2/2  finished")


@pytest.mark.parametrize("exists", [True, False])
def test_empty_folder_says_so(exists, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if exists:
        (tmp_path / "outputs").mkdir()
    assert runs.main([]) == 0
    assert capsys.readouterr().out == ("there are no runs in outputs/; `relay train` starts one\n")
    assert runs.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_folder_that_does_not_exist_is_refused(tmp_path, capsys):
    assert runs.main([str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'gone'}: there is no such folder\n"


def test_order_begins_with_the_largest_and_ends_with_the_unknown(tmp_path, capsys):
    for name, steps in (("a", 3), ("b", 9), ("c", 6)):
        make_run(tmp_path / name, MadeRun(num_steps=steps))
    (tmp_path / "c" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "nan"}\n')
    assert runs.main([str(tmp_path), "--sort", "eval", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows][-1] == "c"
    assert rows[-1]["last_reward"] is None
    assert runs.main([str(tmp_path), "--sort", "steps"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["run", "b", "a", "c"]


def test_thousand_long_runs_are_listed_fast(tmp_path):
    first = make_run(tmp_path / "0", MadeRun(num_steps=2000, samples=0, is_new=False))
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("config.json", "status.json", "events.jsonl", "metrics.jsonl"):
            os.link(first / name, folder / name)
    started_s = time.process_time()
    summaries = [summarize(folder) for folder in run_table.find_runs(tmp_path)]
    text = run_table.format_table(summaries)
    assert time.process_time() - started_s < 10
    assert len(text.splitlines()) == 1001
    assert {run.num_done for run in summaries} == {2000}
