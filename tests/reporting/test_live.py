"""Findings of a run while its files grow."""

import json

from rl.reporting import live
from rl.reporting.data import read_run
from rl.reporting.findings import find
from rl.reporting.live import GrowingFile, RunFollower, describe, follow_run
from tests.support.report_runs import MadeRun, make_run, rollout, run_data

CUT_OFF = {"reward/correct": 0.0, "completion/cut_off": 1.0, "reward/equal_groups": 1.0}


def append(file, *records):
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def test_new_lines_are_read_once_and_an_unfinished_line_waits(tmp_path):
    file = GrowingFile(tmp_path / "x.jsonl")
    assert list(file.read()) == []
    append(tmp_path / "x.jsonl", {"a": 1}, {"a": 2})
    assert list(file.read()) == [{"a": 1}, {"a": 2}]
    with (tmp_path / "x.jsonl").open("a") as unfinished:
        unfinished.write('[1]\n{"a": 3}\n{"a":')
    assert list(file.read()) == [{"a": 3}]
    with (tmp_path / "x.jsonl").open("a") as finished:
        finished.write(" 4}\n")
    assert list(file.read()) == [{"a": 4}]
    assert list(file.read()) == []


def test_only_the_end_of_a_large_file_is_read(tmp_path):
    append(tmp_path / "x.jsonl", *({"a": i} for i in range(10)))  # lines of 9 bytes
    assert list(GrowingFile(tmp_path / "x.jsonl", max_bytes=30).read()) == [
        {"a": 7}, {"a": 8}, {"a": 9},
    ]  # fmt: skip


def test_file_that_takes_the_place_of_a_full_one_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = GrowingFile(path)
    append(path, {"a": 1})
    assert list(file.read()) == [{"a": 1}]
    path.rename(tmp_path / "rollouts.1.jsonl")
    append(path, {"a": 2})
    assert list(file.read()) == [{"a": 2}]


def test_finding_arises_with_its_step(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=2, samples=1, status="running"))
    find_now = follow_run(folder)
    assert find_now() == {}
    texts = []
    for step in range(3, 11):
        append(folder / "metrics.jsonl", {"step": step, **CUT_OFF})
        texts.append(find_now())
    kinds = [list(found) for found in texts]
    assert kinds == [[]] * 4 + [["replies_cut_off"]] * 4  # five steps in a row
    assert texts[-1]["replies_cut_off"].startswith(
        "Replies are cut off. Since step 3 100% of the replies are cut off, before they end"
    )


def test_follower_finds_what_the_report_finds(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(num_steps=30, hacked_from=12))
    of_report = find(read_run(folder))
    assert "reward_hacking" in {finding.kind for finding in of_report}
    assert follow_run(folder)() == {finding.kind: describe(finding) for finding in of_report}


def test_memory_of_a_long_run_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "NUM_FIRST_STEPS", 3)
    monkeypatch.setattr(live, "NUM_LAST_STEPS", 4)
    monkeypatch.setattr(live, "MAX_ROLLOUTS", 5)
    monkeypatch.setattr(live, "MAX_CHARACTERS", 60)
    follower = RunFollower(tmp_path)
    for step in range(1, 21):
        append(tmp_path / "metrics.jsonl", {"step": step, "reward/mean": 0.5})
        append(tmp_path / "rollouts.jsonl", rollout(step, "x" * (2 if step < 15 else 20)))
        append(tmp_path / "rollouts.jsonl", rollout(step, "x", kind="eval"))
        data = follower.read()
        if step == 14:
            assert [line["step"] for line in data.rollouts] == [10, 11, 12, 13, 14]
    assert [record["step"] for record in data.steps] == [1, 2, 3, 17, 18, 19, 20]
    assert [line["step"] for line in data.rollouts] == [18, 19, 20]
    assert "token_ids" not in data.rollouts[0]["turns"][0]


def test_recorded_template_of_the_run_is_known(tmp_path):
    started = {"time": 1.0, "event": "started", "chat_template": True}
    append(tmp_path / "events.jsonl", started)
    assert RunFollower(tmp_path).read().has_chat_template
    assert not run_data(1).has_chat_template
