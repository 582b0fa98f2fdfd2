import json

import pytest

from rl.observability.events import Events
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder
from rl.reporting.findings import find
from rl.reporting.run_data import read_run


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
    """Of a finished run with three steps and two evaluations."""
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
        append(spans, {"role": "trainer", "rank": 0, "host": "h", "pid": 1})
        append(spans, {"name": "push", "start_s": 1.0, "end_s": 1.5, "version": 3})
        run.mark_finished()
        return run.path


def test_a_finished_run_is_read_whole_and_without_problems(folder):
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


def test_a_setting_is_found_by_its_path_and_one_that_is_not_there_has_its_default(folder):
    run = read_run(folder)
    assert run.setting("loop.num_steps") == 3
    assert run.setting("loop.num_steps.deeper", 7) == 7
    assert run.setting("trainer.loss") is None


def test_a_line_that_is_cut_short_is_left_out_and_said_and_the_rest_is_there(folder):
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "reward/me')
    run = read_run(folder)
    assert [r["step"] for r in run.steps] == [1, 2, 3]
    assert run.problems == ["metrics.jsonl: its last line is cut short and left out; the rest is shown"]


def test_lines_in_the_middle_that_are_no_records_are_counted(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:9] + "\n" + lines[2] + "[1]\n" + '{"reward/mean": 1}\n' + lines[4])
    run = read_run(folder)
    assert [r["step"] for r in run.steps] == [2]
    assert len(run.evaluations) == 2
    (problem,) = run.problems
    assert problem.startswith("metrics.jsonl: 3 lines, the first of them line 2, are no records")


def test_numbers_that_json_has_not_come_back_and_what_is_no_number_does_not(folder):
    append(folder / "metrics.jsonl", {"step": 4, "loss/mean": "nan", "loss/grad_norm": "-inf", "note": "hm"})
    last = read_run(folder).steps[-1]
    assert last["loss/mean"] != last["loss/mean"]
    assert last["loss/grad_norm"] == -float("inf")
    assert set(last) == {"step", "loss/mean", "loss/grad_norm"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("reward", [1.0]), ("parts", {"answer": "much"}), ("sample", "first"), ("problem", {}), ("turns", [3])],
)
def test_a_rollout_with_something_else_in_a_field_is_no_record(folder, name, value):
    append(folder / "rollouts.jsonl", rollout(4) | {name: value})
    run = read_run(folder)
    assert [r["step"] for r in run.rollouts] == [1, 2, 3]
    assert run.problems == ["rollouts.jsonl: line 4 is no record and left out; the rest is shown"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("token_ids", ["7"]), ("token_ids", [-1]), ("policy_versions", 0.5), ("reply", 3), ("messages", [None])],
)
def test_a_turn_with_something_else_in_a_field_makes_no_record(folder, name, value):
    line = rollout(4)
    line["turns"][0][name] = value
    append(folder / "rollouts.jsonl", line)
    assert [r["step"] for r in read_run(folder).rollouts] == [1, 2, 3]


def test_rollouts_without_a_reward_are_read_and_judged(folder):
    for step in range(4, 30):
        append(folder / "metrics.jsonl", {"step": step, "reward/mean": step / 30, "reward/equal_groups": 1.0})
        append(folder / "metrics.jsonl", {"step": step, "eval/reward": 0.0, "eval/correct": 0.0})
        for reward in (None, "nan"):
            append(folder / "rollouts.jsonl", rollout(step) | {"reward": reward, "correct": None})
    run = read_run(folder)
    assert len(run.rollouts) == 55
    assert run.rollouts[-2].keys() & {"reward", "correct"} == set()
    assert [finding.kind for finding in find(run)] == ["no_reward_variance"]


def test_of_a_step_that_was_done_again_the_later_record_counts(folder):
    append(folder / "metrics.jsonl", {"step": 2, "reward/mean": 0.9})
    run = read_run(folder)
    assert [(r["step"], r["reward/mean"]) for r in run.steps] == [(1, 0.25), (2, 0.9), (3, 0.75)]
    assert run.problems == [
        "metrics.jsonl has 1 records of steps that come again later: the later ones count"
    ]


def test_rollouts_of_the_file_before_come_first(folder):
    append(folder / "rollouts.1.jsonl", rollout(0, kind="eval"))
    assert [r["step"] for r in read_run(folder).rollouts] == [0, 1, 2, 3]


def test_of_large_files_the_tokens_are_of_every_few_steps_and_texts_of_all(folder):
    size_mb = (folder / "rollouts.jsonl").stat().st_size / 1e6
    run = read_run(folder, tokens_mb=size_mb / 1.5)
    turns = [r["turns"][0] for r in run.rollouts]
    assert ["token_ids" in turn for turn in turns] == [True, False, True]
    assert ["trainer_logprobs" in turn for turn in turns] == [True, False, True]
    assert [turn["reply"] for turn in turns] == ["hi"] * 3
    assert [turn["policy_versions"] for turn in turns] == [1, 2, 3]
    assert len(run.problems) == 1
    assert "one in 2 recorded steps" in run.problems[0]


def test_what_an_older_version_did_not_write_is_said_by_name(tmp_path):
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
    for missing in ("config.json", "status.json", "events.jsonl", "logs/spans", "logprobs of the trainer"):
        assert missing in said
    assert len(run.problems) == 5


@pytest.mark.parametrize("text", ["{", '["values"]', '{"values": 3}'])
def test_a_config_that_cannot_be_read_is_a_problem_and_no_more(folder, text):
    (folder / "config.json").write_text(text)
    run = read_run(folder)
    assert run.setting("loop.num_steps") is None
    assert len(run.steps) == 3
    (problem,) = run.problems
    assert problem.startswith("config.json")


def test_a_folder_that_is_no_run_is_refused_and_runs_in_it_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has none of .*; runs in it: run$"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        read_run(tmp_path / "other")
    with pytest.raises(ValueError, match="is a file"):
        read_run(folder / "metrics.jsonl")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty is not the folder of a run: it has none of status.json, "):
        read_run(empty)


def test_a_run_that_has_not_done_a_step_is_read(tmp_path):
    with RunFolder.create(tmp_path, "new") as begun:
        run = read_run(begun.path)
    assert (run.status, run.steps, run.rollouts) == ("running", [], [])
    assert any("metrics.jsonl is not there" in problem for problem in run.problems)
