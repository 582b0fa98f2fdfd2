import json
from dataclasses import replace
from typing import Any

import numpy as np

from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.evaluation import EvaluatedSet, EvaluationResult
from rl.rollouts.group import Group
from rl.rollouts.producer import Batch
from rl.rollouts.trained import TOO_LONG, TRAINED, TrainedRollout
from rl.tasks.data import read_pass_rates
from rl.types import (
    Branch,
    EndReason,
    Message,
    Observation,
    Problem,
    Prompt,
    Rollout,
    Score,
    Turn,
)
from rl.utils.files import get_previous_file
from tests.support.fakes import completion_of


def not_json(constant):
    raise AssertionError(f"{constant} is no JSON")


def lines(path):
    return [json.loads(line, parse_constant=not_json) for line in path.read_text().splitlines()]


def turn(text="hi", *, logprobs=(-0.5, -1.25), observation=None):
    completion = completion_of([7, 9], version=3)
    return Turn(
        messages=(Message(role="user", content="say hi"),),
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        completion=replace(completion, logprobs=np.array(logprobs, dtype=np.float32)),
        text=text,
        observation=observation or Observation(),
    )


def rollout(name="p", *turns, sample=0, failure=None, **said):
    turns = turns or (turn(**said),)
    prompt = Prompt(
        problem=Problem(id=name, question="q", answer="hi"), token_ids=turns[0].prompt_ids
    )
    end: EndReason = "done" if failure is None else "failed"
    return Rollout(prompt=prompt, sample=sample, turns=turns, end=end, failure=failure)


def score(reward=1.0, **said):
    return Score(reward=reward, correct=reward == 1.0, **said)


def group(name, *scores, rollouts=None):
    rollouts = rollouts or [rollout(name, sample=i) for i in range(len(scores))]
    return Group(number=0, rollouts=rollouts, scores=list(scores))


def advantages_of(*numbers):
    return [TrainedRollout(advantages=np.full(2, number, dtype=np.float32)) for number in numbers]


def recorder(tmp_path, **settings):
    return Recorder(tmp_path / "rollouts.jsonl", config=RecorderConfig(**settings))


def recorded(tmp_path, groups, *, dropped=(), advantages=None, **settings):
    """Return the lines of a step; `advantages` default to 0.5 and -0.5 in turn."""
    made = recorder(tmp_path, **settings)
    if advantages is None:
        advantages = [advantages_of(*[0.5, -0.5] * len(g.scored))[: len(g.scored)] for g in groups]
    made.step(4, Batch(groups=list(groups), dropped=list(dropped)), advantages)
    return lines(made.path) if made.path.exists() else []


def named(recorded_lines):
    return [(line["problem"], line["sample"]) for line in recorded_lines]


def test_line_has_prompt_reply_and_reward(tmp_path):
    (line,) = recorded(tmp_path, [group("p1", score(0.75, parts={"answer": 0.5, "form": 1.0}))])
    assert line == {
        "step": 4,
        "kind": "train",
        "advantage": 0.5,
        "problem": "p1",
        "answer": "hi",
        "sample": 0,
        "group": 0,
        "member": 0,
        "reward": 0.75,
        "correct": False,
        "parts": {"answer": 0.5, "form": 1.0},
        "end": "done",
        "turns": [
            {
                "messages": [{"role": "user", "content": "say hi"}],
                "reply": "hi",
                "finish_reason": "stop",
                "prompt_ids": [1, 2, 3],
                "token_ids": [7, 9],
                "logprobs": [-0.5, -1.25],
                "policy_versions": 3,
                "advantages": 0.5,
            }
        ],
    }


def test_training_data_of_a_tree_is_that_of_trained_turns(tmp_path):
    trained = TrainedRollout(
        advantages=np.array([0.5, 0.5, 0.25, -0.25], dtype=np.float32),
        reasons=np.array([TRAINED, TRAINED, TRAINED, TOO_LONG], dtype=np.int8),
        trainer_logprobs=np.array([-0.5, -1.5, -0.125, np.nan], dtype=np.float32),
    )
    branches = (
        Branch(turns=(0, 2)),
        Branch(turns=(0, 1), role="superseded", cause="again", is_trained=False),
    )
    tree = replace(rollout("p", turn("a"), turn("b"), turn("c")), branches=branches)
    (line,) = recorded(tmp_path, [group("p", score(), rollouts=[tree])], advantages=[[trained]])
    assert line["branches"] == [
        {"turns": [0, 2], "role": "main", "cause": "", "trained": True},
        {"turns": [0, 1], "role": "superseded", "cause": "again", "trained": False},
    ]
    names = ("advantages", "mask", "trainer_logprobs")
    assert [[t.get(name) for name in names] for t in line["turns"]] == [
        [0.5, 1, [-0.5, -1.5]],
        [None, None, None],
        [[0.25, -0.25], [1, 0], [-0.125, "nan"]],
    ]
    assert all("logprobs" in t for t in line["turns"])
    assert "state" not in line


def test_a_single_branch_is_recorded_if_it_is_not_a_plain_one(tmp_path):
    hidden = replace(rollout("p"), branches=(Branch(turns=(0,), is_trained=False),))
    nothing = TrainedRollout(advantages=np.zeros(0, dtype=np.float32))
    (line,) = recorded(tmp_path, [group("p", score(), rollouts=[hidden])], advantages=[[nothing]])
    assert line["branches"] == [{"turns": [0], "role": "main", "cause": "", "trained": False}]
    assert "advantages" not in line["turns"][0]


def test_state_is_recorded_with_long_texts_cut(tmp_path):
    state = {
        "exit": np.int64(1), "share": 0.5, "ok": None, "output": "x" * 9000,
        "files": {"a.py": "y" * 9000, "deep": {"er": {"est": 1}}}, "many": [*range(1000)],
        "other": {1, 2},
    }  # fmt: skip
    left = replace(rollout("p"), state=state)
    (line,) = recorded(tmp_path, [group("p", score(), rollouts=[left])])
    kept = line["state"]
    assert [kept[name] for name in ("exit", "share", "ok", "other")] == [1, 0.5, None, "{1, 2}"]
    for text in (kept["output"], kept["files"]["a.py"]):
        assert 2000 < len(text) < 2100
        assert "(7000 characters more)" in text
    assert kept["files"]["deep"] == {"er": "{'est': 1}"}
    assert kept["many"] == [*range(100)]


def test_training_data_is_split_by_turns(tmp_path):
    trained = TrainedRollout(
        advantages=np.array([0.5, 0.5, 0.25, -0.25], dtype=np.float32),
        reasons=np.array([TRAINED, TRAINED, TRAINED, TOO_LONG], dtype=np.int8),
        trainer_logprobs=np.array([-0.5, -1.2500004, -0.125, np.nan], dtype=np.float32),
    )
    replies = [rollout("p", turn("a"), turn("b"))]
    (line,) = recorded(tmp_path, [group("p", score(), rollouts=replies)], advantages=[[trained]])
    one, two = line["turns"]
    names = ("trainer_logprobs", "advantages", "mask")
    assert [one[name] for name in names] == [[-0.5, -1.25], 0.5, 1]
    assert [two[name] for name in names] == [[-0.125, "nan"], [0.25, -0.25], [1, 0]]


def test_logprobs_from_before_a_step_of_several_minibatches_are_recorded(tmp_path):
    trained = TrainedRollout(
        advantages=np.zeros(2, dtype=np.float32),
        trainer_logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        proximal_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
    )
    (line,) = recorded(tmp_path, [group("p", score())], advantages=[[trained]])
    assert line["turns"][0]["trainer_logprobs"] == [-0.5, -0.25]


def test_recorded_ids_are_those_of_the_recorded_rollouts(tmp_path):
    groups = [
        group("a", score(), score(0.0, failure="raised"), score(0.0)),
        group("b", score(), score(0.0, unparsed=("answer",)), score(0.0, failure="raised")),
        group("c", score(0.0, failure="raised"), score(), score()),
    ]
    # Indices count the scored rollouts of a group only.
    assert recorder(tmp_path, num_groups=1).choose_ids(groups) == [(0, 0), (0, 1), (1, 1)]
    every = [(group, index) for group in range(3) for index in range(2)]
    assert recorder(tmp_path, num_groups=None).choose_ids(groups) == every
    for nothing in ({"num_groups": 0}, {"tokens": False}, {"enable": False}):
        assert recorder(tmp_path, **nothing).choose_ids(groups) == []


def test_first_groups_and_failures_are_recorded(tmp_path):
    groups = [
        group("a", score(), score(0.0)),
        group("b", score(), score(0.0)),
        group("c", score(0.0, unparsed=("answer",)), score(), score(0.0, failure="raised")),
        group("d", score()),
    ]
    written = recorded(tmp_path, groups, num_groups=1)
    assert named(written) == [("a", 0), ("a", 1), ("c", 0), ("c", 2)]
    assert written[2]["unparsed"] == ["answer"]
    assert written[3]["failure"] == "raised"
    assert not {"unparsed", "failure"} & (set(written[0]) | set(written[1]))


def test_advantages_skip_failed_rollouts(tmp_path):
    replies = [
        rollout("p", sample=i, failure="the environment raised" if i == 2 else None)
        for i in range(4)
    ]
    failed = [score(0.0, failure=why) for why in ("broken", "the environment raised")]
    mixed = group("p", score(), *failed, score(0.0), rollouts=replies)
    written = recorded(tmp_path, [mixed], advantages=[advantages_of(1.0, -1.0)])
    assert [line.get("advantage") for line in written] == [1.0, None, None, -1.0]
    failures = [line.get("failure") for line in written]
    assert failures == [None, "broken", "the environment raised", None]
    assert written[2]["end"] == "failed"


def test_dropped_groups_have_their_reason(tmp_path):
    failed = score(0.0, failure="raised")
    dropped = [
        ("equal", group("x", score())),
        ("equal", group("y", score())),
        ("failed", group("z", failed)),
    ]
    written = recorded(tmp_path, [group("a", score())], dropped=dropped, num_groups=1)
    said = [(line["problem"], line["kind"], line.get("dropped")) for line in written]
    assert said == [("a", "train", None), ("x", "dropped", "equal"), ("z", "dropped", "failed")]
    assert "advantage" not in written[1]


def test_evaluations_are_recorded_by_set(tmp_path):
    def pair(name, sample=0):
        return rollout(name, sample=sample), score()

    near = EvaluatedSet(
        name="near",
        greedy=[pair("a"), pair("b"), pair("c")],
        sampled=[[pair("a", 0), pair("a", 1)], [pair("b", 0)], [pair("c", 0)]],
    )
    far = EvaluatedSet(name="far", greedy=[pair("d")], sampled=[])
    made = recorder(tmp_path, num_eval_problems=2)
    made.evaluation(20, EvaluationResult(sets=[near, far]))
    # All sampled problems have a pass rate, even unrecorded ones; greedy replies do not count.
    assert read_pass_rates(str(tmp_path / "pass_rates.jsonl")).keys() == {"a", "b", "c"}
    said = [
        (line["kind"], line["set"], line["problem"], line["sample"]) for line in lines(made.path)
    ]
    assert said == [
        ("eval", "near", "a", 0),
        ("eval", "near", "b", 0),
        ("eval_sampled", "near", "a", 0),
        ("eval_sampled", "near", "a", 1),
        ("eval_sampled", "near", "b", 0),
        ("eval", "far", "d", 0),
    ]
    assert {line["step"] for line in lines(made.path)} == {20}


def test_all_numbers_are_valid_json(tmp_path):
    # A user's reward function may return any of these.
    numbers: Any = {"calls": np.int64(2), "took_s": float("inf")}
    parts: Any = {"answer": np.float32(0.5), "form": np.bool_(True), "length": np.int64(3)}
    half: Any = np.float32(0.5)
    right: Any = np.bool_(True)
    given = Observation(reward=half, metrics=numbers)
    replies = [rollout("p", logprobs=(np.nan, -np.inf), observation=given)]
    odd = group("p", Score(reward=half, correct=right, parts=parts), rollouts=replies)
    (line,) = recorded(tmp_path, [odd], advantages=[advantages_of(np.nan)])
    assert line["parts"] == {"answer": 0.5, "form": True, "length": 3}
    assert (line["reward"], line["correct"]) == (0.5, True)
    (said,) = line["turns"]
    assert said["logprobs"] == ["nan", "-inf"]
    assert (said["reward"], said["metrics"]) == (0.5, {"calls": 2, "took_s": "inf"})
    assert line["advantage"] == ["nan", "nan"]  # nan equals nothing, not even itself


def write_steps(made, steps):
    for step in steps:
        made.step(step, Batch(groups=[group("p", score())], dropped=[]), [advantages_of(1.0)])


def test_full_file_keeps_the_newest_rollouts(tmp_path):
    made = recorder(tmp_path, max_megabytes=0.004)
    write_steps(made, range(100))
    files = [get_previous_file(made.path), made.path]
    assert [f.name for f in files] == ["rollouts.1.jsonl", "rollouts.jsonl"]
    assert sum(f.stat().st_size for f in files) <= 4000
    steps = [line["step"] for line in read_rollouts(made.path)]
    assert steps == list(range(steps[0], 100))
    # A line has about 300 bytes, so more than half of the room is always in use.
    assert len(steps) >= 6
    assert all(f.stat().st_size <= 2000 for f in files)


def test_rollout_longer_than_the_file_is_skipped(tmp_path, caplog):
    made = recorder(tmp_path, max_megabytes=0.002)
    long = group("long", score(), rollouts=[rollout("long", text="x" * 1000)])
    made.step(1, Batch(groups=[group("a", score()), long], dropped=[]), [advantages_of(1.0)] * 2)
    write_steps(made, [2])
    assert [line["problem"] for line in read_rollouts(made.path)] == ["a", "p"]
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "too long for rollouts.jsonl" in warning.getMessage()
