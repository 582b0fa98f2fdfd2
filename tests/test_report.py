"""The report's entry, as a user calls it; the page itself is tested in tests/reporting/html."""

import io
import json
import os
import re

import pytest

from rl import report
from rl.observability.activity import Activity
from rl.reporting.html.blocks import unpacked
from tests.support.report_runs import MadeRun, make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "outputs" / "run", MadeRun(num_steps=3))


def shown(file):
    """What a page shows at once."""
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', file.read_text())
    return json.loads(text)


def blocks(file):
    """Of a page, by identifier."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">(.*?)</script>', file.read_text())
    return {name: unpacked(block) for name, block in found}


def test_the_report_is_one_file_in_the_runs_folder_and_nothing_else_there_changes(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert report.main([str(run)]) == 0
    file = run / "report.html"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path != file} == before
    size = f"{file.stat().st_size / 1e6:.1f}"
    assert capsys.readouterr().out == f"{file}: {size} MB\n"
    assert blocks(file)["curves-0"]["series"]["reward/std"]["y"] == [0.4, 0.4, 0.4]


def test_a_terminal_that_lacks_characters_of_a_run_gets_others(run, monkeypatch):
    event = {"time": 5.0, "event": "stopped", "reason": "NonFiniteLossError: step 3 \ud800 \u2713"}
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert report.main([str(run)]) == 0
    terminal.seek(0)
    assert "NonFiniteLossError: step 3 \\ud800 \\u2713" in terminal.read()


def test_whether_the_run_goes_on_is_asked_of_its_controller(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=3, status="running"))
    activity = Activity()
    record = activity.start(folder / "logs" / "state", role="controller", rank=0)
    activity.stop()
    assert report.main([str(folder)]) == 0
    (run,) = shown(folder / "report.html")["runs"]
    assert run["facts"]["state"] == "running"
    assert run["processes"][0] | {"host": ""} == {
        "role": "controller",
        "rank": 0,
        "host": "",
        "pid": os.getpid(),
    }
    record.write_text(re.sub(r'"start_ticks": \d+', '"start_ticks": 1', record.read_text()))
    assert report.main([str(folder)]) == 0
    assert shown(folder / "report.html")["runs"][0]["facts"]["state"] == "ended"


def test_two_runs_are_in_one_file_under_names_that_tell_them_apart(run, tmp_path):
    other = make_run(tmp_path / "elsewhere" / "run", MadeRun(num_steps=5, seed=1))
    file = tmp_path / "both.html"
    assert report.main([str(run), str(other), "--output", str(file)]) == 0
    assert "<title>outputs/run and elsewhere/run</title>" in file.read_text()
    found = blocks(file)
    assert [len(found[f"rollouts-{i}"]["columns"]["step"]) for i in range(2)] == [12, 20]
    assert not (run / "report.html").exists()


def test_a_folder_that_is_no_run_is_refused_with_status_2_and_nothing_is_written(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path} is not the folder of a run")
    assert list(tmp_path.iterdir()) == []
    assert report.main([str(tmp_path / "gone")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named_with_status_2(run, tmp_path, capsys):
    file = tmp_path / "gone" / "report.html"
    assert report.main([str(run), "--output", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} cannot be written: No such file or directory\n"


def test_of_a_metrics_file_that_is_cut_in_a_line_the_rest_is_shown_and_it_is_said(run, capsys):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    assert report.main([str(run)]) == 0
    assert "run: metrics.jsonl" in capsys.readouterr().out
    assert blocks(run / "report.html")["curves-0"]["xs"][0] == [1, 2]


def test_more_than_two_folders_are_refused(run, capsys):
    with pytest.raises(SystemExit) as refused:
        report.main([str(run)] * 3)
    assert refused.value.code == 2
    assert "3 folders: a report is of one run, or compares two" in capsys.readouterr().err
