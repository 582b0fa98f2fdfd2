"""The report command; tests/reporting/html tests the page itself."""

import json
import os
import re

import pytest

from rl import report
from rl.observability.spans import SpanRecorder
from tests.support.report_runs import MadeRun, make_run, unpack


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "outputs" / "run", MadeRun(num_steps=3))


def shown(file):
    """Return the part of a page that is visible at once."""
    (text,) = re.findall(
        r'<script type="application/json" id="report">(.*?)</script>', file.read_text()
    )
    return json.loads(text)


def blocks(file):
    """Return the blocks of a page by identifier."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">(.*?)</script>', file.read_text())
    return {name: unpack(block) for name, block in found}


def test_report_is_the_only_file_that_changes(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert report.main([str(run)]) == 0
    file = run / "report.html"
    assert {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path != file
    } == before
    size = f"{file.stat().st_size / 1e6:.1f}"
    assert capsys.readouterr().out == f"{file}: {size} MB\n"
    assert blocks(file)["curves-0"]["series"]["reward/std"]["y"] == [0.4, 0.4, 0.4]


def test_state_depends_on_the_controller_process(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=3, status="running"))
    activity = SpanRecorder()
    record = activity.start(folder / "logs", role="controller", rank=0)
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


def test_two_runs_have_distinct_names_in_one_file(run, tmp_path):
    other = make_run(tmp_path / "elsewhere" / "run", MadeRun(num_steps=5, seed=1))
    file = tmp_path / "both.html"
    assert report.main([str(run), str(other), "--output", str(file)]) == 0
    assert "<title>outputs/run and elsewhere/run</title>" in file.read_text()
    found = blocks(file)
    assert [len(found[f"rollouts-{i}"]["columns"]["step"]) for i in range(2)] == [12, 20]
    assert not (run / "report.html").exists()


def test_missing_folder_and_more_than_two_are_refused(tmp_path, capsys):
    assert report.main([str(tmp_path / "gone")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        report.main([str(tmp_path)] * 3)
    assert refused.value.code == 2
    assert "3 folders: a report is of one run, or compares two" in capsys.readouterr().err
