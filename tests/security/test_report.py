"""A report of a folder from elsewhere: no code of it runs, nothing hangs, and the report is still
written.
"""

import json
import os
import re
import sys
from dataclasses import replace

import pytest

from actors.prepare import prepare_run
from rl import report
from rl.config.json import to_dict
from rl.config.registry import resolve
from rl.observability.spans import SpanRecorder
from rl.reporting.data import read_run
from tests.support.report_runs import MadeRun, make_run

DEEP, HUGE = "[" * 100_000 + "]" * 100_000, "9" * 5000


@pytest.fixture
def folder(tmp_path):
    stop = {"time": 1_764_000_001.0, "event": "stopped", "reason": "NonFiniteLossError in step 3"}
    made = make_run(tmp_path / "run", MadeRun(num_steps=3, samples=2, events=(stop,)))
    (made / "defaults.json").write_text(json.dumps({"name": None, "loop": {"num_steps": 1}}))
    spans = SpanRecorder()
    spans.start(made / "logs", role="controller", rank=0)
    spans.stop()
    return made


def shown(folder):
    (text,) = re.findall(
        r'<script type="application/json" id="report">(.*?)</script>',
        (folder / "report.html").read_text(),
    )
    return json.loads(text)["runs"][0]


def test_report_does_not_import_the_module_of_the_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "received_code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef tiny(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"module": "received_code"}
    (folder / "config.json").write_text(json.dumps(config))
    assert report.main([str(folder)]) == 0
    assert not (tmp_path / "ran").exists()
    assert "received_code" not in sys.modules


def test_run_leaves_what_the_report_needs_in_its_folder(tmp_path):
    request = resolve("tests.support.faulty_configs", "short")
    before = to_dict(request.config)
    config = resolve("tests.support.faulty_configs", "short").config
    config.dump_folder, config.name, config.loop.num_steps = str(tmp_path), "mine", 77
    with prepare_run(replace(request, config=config)) as prepared:
        folder = prepared.folder.path
    assert json.loads((folder / "defaults.json").read_text()) == before
    assert read_run(folder).defaults == before


def test_options_that_differ_come_from_the_folder(folder):
    assert report.main([str(folder)]) == 0
    rows = {row["path"]: row for row in shown(folder)["config"]}
    assert rows["loop.num_steps"] == {"path": "loop.num_steps", "value": "3", "default": "1"}
    assert shown(folder)["config_note"] is None


def test_folder_of_an_older_version_gets_a_report_without_that_part(folder):
    (folder / "defaults.json").unlink()
    assert report.main([str(folder)]) == 0
    run = shown(folder)
    assert run["config"]
    assert not [row for row in run["config"] if "default" in row]
    assert "the folder has no defaults.json" in run["config_note"]


@pytest.mark.parametrize(
    "text", [DEEP, HUGE, "[" * 200 + "]" * 200, f'{{"a": {HUGE}}}', "[]", "\xff", ""]
)
@pytest.mark.parametrize(
    "name", ["config.json", "defaults.json", "environment.json", "status.json", "state"]
)
def test_damaged_file_leaves_the_rest_of_the_report(folder, name, text):
    file = folder / name if name != "state" else next((folder / "logs").glob("*/controller-0.json"))
    file.write_text(text, encoding="latin-1")
    assert report.main([str(folder)]) == 0
    assert len(read_run(folder).steps) == 3


FIELDS = {
    "metrics.jsonl": ["step", "reward/mean", "loss/mean", "time/step_s"],
    "rollouts.jsonl": [
        "step", "sample", "problem", "correct", "reward", "advantage", "parts", "turns",
        "group", "member",
        "turns.messages",
        "turns.token_ids", "turns.prompt_ids", "turns.logprobs", "turns.policy_versions",
        "turns.mask",
        "turns.trainer_logprobs",
    ],
    "events.jsonl": ["time", "event", "reason"],
    "logs/spans/controller-0.jsonl": ["ts", "dur", "name", "args"],
    "config.json": ["values", "values.hf_assets_path", "values.loop"],
}  # fmt: skip
ODD = (
    "null", "-1", "0", "1e400", "NaN", '"x"', "[]", "{}", "[null]", '{"a": 1}', "9" * 90,
    "[" + "9" * 90 + "]",
    DEEP, HUGE, '{"overlong": "x"}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in FIELDS.items() for field in fields]
)
def test_odd_values_are_skipped_or_shown(folder, name, field):
    file = folder / name
    first, *others = (
        file.read_text().split("\n", 1) if name.endswith(".jsonl") else [file.read_text()]
    )
    line = json.loads(first)
    outer, _, inner = field.rpartition(".")
    for target in [line[outer][0] if outer == "turns" else line[outer] if outer else line]:
        target[inner] = "@@"
    for odd in ODD:
        file.write_text("\n".join([json.dumps(line).replace('"@@"', odd), *others]))
        assert report.main([str(folder)]) == 0, odd


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "rollouts.jsonl", "logs/spans/trainer-0.jsonl"]
)
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_pipe_or_device_in_place_of_a_file_ends_with_one_line_and_status_2(
    folder, name, target, capsys
):
    file = folder / name
    file.unlink()
    os.mkfifo(file) if target == "pipe" else file.symlink_to(target)
    assert report.main([str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {file} is not a regular file\n"


def test_report_writes_through_no_link_of_the_folder(folder, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("of mine")
    for name in ("report.html", "report.html.tmp"):
        (folder / name).symlink_to(mine)
    assert report.main([str(folder)]) == 0
    assert mine.read_text() == "of mine"
    assert not (folder / "report.html").is_symlink()
