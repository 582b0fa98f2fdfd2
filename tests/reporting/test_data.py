import json

import pytest

from rl.observability.events import Events
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder
from rl.reporting.data import read_run
from rl.reporting.findings import find


def rollout(step, *, kind="train", tokens=True, text="hi"):
    turn = {"messages": [], "reply": text, "finish_reason": "stop"}
    if tokens:
        turn |= {
            "prompt_ids": [1],
            "token_ids": [7, 9],
            "logprobs": [-0.5, -1.0],
            "policy_versions": step,
            "trainer_logprobs": [-0.5, -1.0],
            "advantages": 0.5,
            "mask": 1,
        }
    return {"step": step, "kind": kind, "advantage": 0.5, "reward": 1.0, "turns": [turn]}


def append(file, *records):
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path):
    """Folder of a finished run with three steps and two evaluations."""
    with RunFolder.create(tmp_path, "run") as run:
        run.config_json.write_text(
            json.dumps({"module": "m", "config": "c", "values": {"loop": {"num_steps": 3}}})
        )
        with MetricsWriter(run.metrics) as metrics:
            metrics.write({"step": 0, "eval/correct": 0.25})
            for step in (1, 2, 3):
                metrics.write({"step": step, "reward/mean": step / 4})
            metrics.write({"step": 3, "eval/correct": 0.75})
        append(run.rollouts, *map(rollout, (1, 2, 3)))
        Events(run.events, wall_clock=lambda: 5.0).add("started")
        spans = run.logs / "spans" / "trainer-0.jsonl"
        spans.parent.mkdir()
        append(spans, {"ph": "X", "name": "push", "ts": 1e6, "dur": 5e5, "args": {"version": 3}})
        run.mark_finished()
        return run.path


def test_finished_run_has_no_problems(folder):
    run = read_run(folder)
    assert run.problems == []
    assert run.status == "finished"
    assert [(r["step"], r["reward/mean"]) for r in run.steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(r["step"], r["eval/correct"]) for r in run.evaluations] == [(0, 0.25), (3, 0.75)]
    assert [r["step"] for r in run.rollouts] == [1, 2, 3]
    assert run.events == [{"time": 5.0, "event": "started"}]
    (span,) = run.spans
    assert (span.role, span.rank, span.name, span.end_s - span.start_s, span.version) == (
        "trainer", 0, "push", 0.5, 3,
    )  # fmt: skip


def test_damaged_lines_are_counted_and_skipped(folder):
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": \n[1]\n{"reward/mean": 1}\n{"step": 4, "reward/me')
    append(folder / "rollouts.jsonl", rollout(4) | {"turns": [3]})
    run = read_run(folder)
    assert [r["step"] for r in run.steps] == [r["step"] for r in run.rollouts] == [1, 2, 3]
    assert run.problems == [
        "metrics.jsonl: 4 damaged lines are skipped, the first of them line 6; the rest is shown",
        "rollouts.jsonl: 1 damaged lines are skipped, the first of them line 4; the rest is shown",
    ]


def test_later_record_of_a_step_counts_and_numbers_that_are_not_finite_are_restored(folder):
    append(folder / "metrics.jsonl", {"step": 2, "reward/mean": 0.9})
    steps = [(r["step"], r["reward/mean"]) for r in read_run(folder).steps]
    assert steps == [(1, 0.25), (2, 0.9), (3, 0.75)]
    append(folder / "metrics.jsonl", {"step": 4, "loss/mean": "nan", "loss/grad_norm": "-inf", "note": "hm"})
    last = read_run(folder).steps[-1]
    assert last["loss/mean"] != last["loss/mean"]
    assert last["loss/grad_norm"] == -float("inf")
    assert set(last) == {"step", "loss/mean", "loss/grad_norm"}


def test_rollouts_without_a_reward_are_read(folder):
    for step in range(4, 30):
        append(folder / "metrics.jsonl", {"step": step, "reward/mean": step / 30, "reward/equal_groups": 1.0})
        append(folder / "metrics.jsonl", {"step": step, "eval/reward": 0.0, "eval/correct": 0.0})
        for reward in (None, "nan"):
            append(folder / "rollouts.jsonl", rollout(step) | {"reward": reward, "correct": None})
    run = read_run(folder)
    assert len(run.rollouts) == 55
    assert run.rollouts[-2].keys() & {"reward", "correct"} == set()
    assert [finding.kind for finding in find(run)] == ["no_reward_variance"]


def test_large_files_keep_the_tokens_of_some_steps(folder):
    size_mb = (folder / "rollouts.jsonl").stat().st_size / 1e6
    run = read_run(folder, tokens_mb=size_mb / 1.5)
    turns = [r["turns"][0] for r in run.rollouts]
    assert ["token_ids" in turn for turn in turns] == [True, False, True]
    assert ["trainer_logprobs" in turn for turn in turns] == [True, False, True]
    assert [turn["reply"] for turn in turns] == ["hi"] * 3
    assert [turn["policy_versions"] for turn in turns] == [1, 2, 3]
    assert len(run.problems) == 1
    assert "one in 2 recorded steps" in run.problems[0]


def test_missing_files_of_an_older_version_are_named(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    append(old / "metrics.jsonl", {"step": 1, "reward/mean": 0.5})
    turn = {"messages": [], "reply": "hi", "token_ids": [7], "logprobs": [-1.0]}
    append(
        old / "rollouts.jsonl", {"step": 1, "kind": "train", "advantage": 0.5, "reward": 1, "turns": [turn]}
    )
    run = read_run(old)
    assert len(run.steps) == len(run.rollouts) == 1
    assert run.status is None
    said = "\n".join(run.problems)
    for missing in ("config.json", "status.json", "events.jsonl", "logs/spans"):
        assert missing in said
    assert len(run.problems) == 4


def test_folder_that_is_not_a_run_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has none of status.json, "):
        read_run(tmp_path)
    for path in (tmp_path / "other", folder / "metrics.jsonl"):
        with pytest.raises(ValueError, match="there is no such folder"):
            read_run(path)
