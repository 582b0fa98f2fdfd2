import json
from typing import Any

import pytest

from rl.reporting.data import find_last_turn, read_run
from rl.reporting.findings import find
from tests.support.report_runs import START_S, TEXT, MadeRun, make_run


def append(file, *records):
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run", MadeRun(num_steps=3, samples=1))


def test_finished_run_has_no_problems(folder):
    run = read_run(folder)
    assert run.problems == []
    assert run.status == "finished"
    assert [r["step"] for r in run.steps] == [r["step"] for r in run.rollouts] == [1, 2, 3]
    assert [(r["step"], r["eval/num_problems"]) for r in run.evaluations] == [
        (n, 512) for n in range(4)
    ]
    assert [event["event"] for event in run.events] == ["started", "finished"]
    (span, *_) = (span for span in run.spans if span.name == "push" and span.version == 2)
    assert (span.process, span.start_s) == ("trainer[0]", START_S + 2 * 2.0 + 0.91 * 2.0)


def test_damaged_lines_are_counted_and_skipped(folder):
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": \n[1]\n{"reward/mean": 1}\n{"step": 4, "reward/me')
    append(folder / "rollouts.jsonl", {"step": 4, "kind": "train", "turns": [3]})
    run = read_run(folder)
    assert [r["step"] for r in run.steps] == [r["step"] for r in run.rollouts] == [1, 2, 3]
    assert run.problems == [
        "metrics.jsonl: 4 damaged lines are skipped, the first of them line 8; the rest is shown",
        "rollouts.jsonl: 1 damaged lines are skipped, the first of them line 4; the rest is shown",
    ]


def test_later_record_of_a_step_counts_and_numbers_that_are_not_finite_are_restored(folder):
    append(folder / "metrics.jsonl", {"step": 2, "reward/mean": 0.9})
    _, second, third = read_run(folder).steps
    assert (second, third["step"]) == ({"step": 2, "reward/mean": 0.9}, 3)
    append(
        folder / "metrics.jsonl",
        {"step": 4, "loss/mean": "nan", "loss/grad_norm": "-inf", "note": "hm"},
    )
    last = read_run(folder).steps[-1]
    assert last["loss/mean"] != last["loss/mean"]
    assert last["loss/grad_norm"] == -float("inf")
    assert set(last) == {"step", "loss/mean", "loss/grad_norm"}


def test_metrics_of_older_runs_have_their_present_names(folder):
    append(folder / "metrics.jsonl", {"step": 4, "age/max": 2, "time/canary_s": 0.125})
    assert read_run(folder).steps[-1] == {"step": 4, "staleness/max": 2, "time/parity_s": 0.125}


def test_rollouts_without_a_reward_are_read(folder):
    last = read_run(folder).rollouts[-1]
    for step in range(4, 30):
        append(
            folder / "metrics.jsonl",
            {"step": step, "reward/correct": 0.3, "reward/equal_groups": 1.0},
        )
        append(folder / "metrics.jsonl", {"step": step, "eval/reward": 0.0, "eval/correct": 0.0})
        for reward in (None, "nan"):
            append(
                folder / "rollouts.jsonl", last | {"step": step, "reward": reward, "correct": None}
            )
    run = read_run(folder)
    assert len(run.rollouts) == 55
    assert run.rollouts[-2].keys() & {"reward", "correct"} == set()
    assert [finding.kind for finding in find(run)] == ["no_reward_variance"]


def test_branches_are_read_and_damaged_ones_are_skipped(folder):
    last = read_run(folder).rollouts[-1]
    (turn,) = last["turns"]
    turns = [{**turn, "reply": reply} for reply in "abc"]
    branch = {"turns": [0, 1], "role": "main", "cause": "", "trained": True}
    agent = {"turns": [2], "role": "sub-agent", "cause": "agent", "trained": True}
    damaged: list[Any] = [[], [{"turns": [3]}], [{"turns": []}], ["main"]]
    for branches in ([branch, agent], [agent], *damaged):
        append(folder / "rollouts.jsonl", last | {"turns": turns, "branches": branches})
    run = read_run(folder)
    assert len(run.rollouts) == 3 + 2
    assert "4 damaged lines are skipped" in run.problems[0]
    linear, tree, agent_alone = run.rollouts[-3:]
    ends = [find_last_turn(rollout) for rollout in (linear, tree, agent_alone)]
    assert [end and end["reply"] for end in ends] == [TEXT, "b", "c"]


def test_large_files_keep_the_tokens_of_some_steps(folder):
    size_mb = (folder / "rollouts.jsonl").stat().st_size / 1e6
    run = read_run(folder, tokens_mb=size_mb / 1.5)
    turns = [r["turns"][0] for r in run.rollouts]
    assert ["token_ids" in turn for turn in turns] == [True, False, True]
    assert ["trainer_logprobs" in turn for turn in turns] == [True, False, True]
    assert [turn["reply"] for turn in turns] == [TEXT] * 3
    assert [turn["policy_versions"] for turn in turns] == [0, 1, 2]
    assert len(run.problems) == 1
    assert "one in 2 recorded steps" in run.problems[0]


def test_missing_files_of_an_older_version_are_named(tmp_path):
    old = make_run(tmp_path / "old", MadeRun(num_steps=1, samples=1, is_new=False))
    for name in ("config.json", "status.json", "events.jsonl"):
        (old / name).unlink()
    run = read_run(old)
    assert len(run.steps) == len(run.rollouts) == 1
    assert run.status is None
    said = "\n".join(run.problems)
    for missing in ("config.json", "status.json", "events.jsonl", "logs/spans"):
        assert missing in said
    assert len(run.problems) == 4
