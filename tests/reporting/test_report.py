"""The report command; tests/reporting/html tests the page itself."""

import json
import os
import re

import pytest

from rl import report
from rl.observability.spans import SpanRecorder
from rl.reporting.html import page
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


def test_missing_folder_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path / "gone")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def make_runs(folder, **made):
    """Write a run for each name and return their folders."""
    return [make_run(folder / name, run) for name, run in made.items()]


def test_runs_that_differ_by_seed_are_one_line_of_many(tmp_path):
    folders = make_runs(
        tmp_path,
        low_0=MadeRun(num_steps=3),
        high=MadeRun(num_steps=3, lr=1e-3),
        low_1=MadeRun(num_steps=3, seed=1),
    )
    for seed, folder in ((0, folders[0]), (1, folders[2])):
        config = json.loads((folder / "config.json").read_text())
        config["values"]["seed"] = seed
        (folder / "config.json").write_text(json.dumps(config))
    file = tmp_path / "all.html"
    assert report.main([*map(str, folders), "--output", str(file)]) == 0
    assert "<title>low_0, high and low_1</title>" in file.read_text()
    assert shown(file)["lines"] == [
        {"name": "low (seeds 0, 1)", "block": "band-0", "runs": [0, 2]},
        {"name": "high", "block": "curves-1", "runs": [1]},
    ]
    found = blocks(file)
    single = [found[f"curves-{number}"]["series"]["reward/mean"]["y"] for number in (0, 2)]
    band = found["band-0"]["series"]["reward/mean"]
    assert band["low"] == [min(pair) for pair in zip(*single, strict=True)]
    assert band["high"] == [max(pair) for pair in zip(*single, strict=True)]


def test_two_runs_that_differ_by_seed_stay_two_lines(tmp_path):
    folders = make_runs(tmp_path, a=MadeRun(num_steps=2), b=MadeRun(num_steps=2, seed=1))
    file = tmp_path / "both.html"
    assert report.main([*map(str, folders), "--output", str(file)]) == 0
    assert [line["runs"] for line in shown(file)["lines"]] == [[0], [1]]


def test_all_folders_of_the_outputs_are_reported_without_those_that_are_no_runs(tmp_path, capsys):
    outputs = tmp_path / "outputs"
    folders = make_runs(outputs, a=MadeRun(num_steps=2), b=MadeRun(num_steps=2, lr=1e-3))
    (outputs / "starting_points").mkdir()
    (outputs / "try.sweep.json").write_text("{}")
    file = tmp_path / "all.html"
    # As `outputs/*` is expanded, with a run that is named once more.
    every = [*sorted(outputs.iterdir()), folders[0]]
    assert report.main([*map(str, every), "--output", str(file)]) == 0
    assert [run["name"] for run in shown(file)["runs"]] == ["a", "b"]
    said = capsys.readouterr().err
    assert f"note: {outputs / 'starting_points'} is left out" in said
    assert f"note: {outputs / 'try.sweep.json'} is left out" in said
    # Beside a single run, too, what lies in `outputs`.
    (outputs / "data").mkdir()
    beside = [str(folders[0]), str(outputs / "data"), "--output", str(file)]
    assert report.main(beside) == 0
    # A typo is an error, however many there are.
    assert report.main([*map(str, folders), str(outputs / "c"), "--output", str(file)]) == 2


def test_many_runs_share_the_size_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "ROLLOUT_BYTES", 120_000)
    folders = [
        make_run(tmp_path / f"run-{i}", MadeRun(num_steps=20, tokens=20, lr=i / 1e5))
        for i in range(6)
    ]
    file = tmp_path / "all.html"
    assert report.main([*map(str, folders), "--output", str(file)]) == 0
    assert "<title>run-0, run-1 and 4 more</title>" in file.read_text()
    assert [line["runs"] for line in shown(file)["lines"]] == [[i] for i in range(6)]
    pattern = r'<script type="text/plain" id="(?:rollouts|chunk)-[\w-]+">(.*?)</script>'
    packed = re.findall(pattern, file.read_text())
    assert sum(map(len, packed)) < 120_000
    for number in range(6):
        kept = blocks(file)[f"rollouts-{number}"]
        assert 0 < len(kept["columns"]["step"]) < kept["num_recorded"] == 80
