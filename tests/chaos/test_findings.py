"""What the chaos test says of runs whose folders are known."""

import json
from functools import partial

import pytest

from actors.fault_injection import Fault
from rl.observability.events import Events
from tools.chaos.cases import Case
from tools.chaos.findings import differences, look_at
from tools.chaos.main import Outcome, summary, table
from tools.chaos.runs import Ended

METRICS: list[dict[str, object]] = [
    {"step": 0, "eval/correct": 0.25, "time/eval_s": 1.0},
    {"step": 1, "loss/mean": -0.125, "loss/grad_norm": "nan", "time/step_s": 2.0, "perf/tokens_per_s": 99.0},
]
ROLLOUTS = [
    {"step": 1, "kind": "train", "problem": f"p/{n}", "sample": s} for n in range(2) for s in range(2)
]


@pytest.fixture
def make_run(tmp_path):
    def make(name, *, metrics=METRICS, rollouts=ROLLOUTS, status="finished", struck_at=100.0, events=()):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        for file, lines in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "status.json").write_text(json.dumps({"status": status}))
        if struck_at is not None:
            (folder / "logs" / "fault.json").write_text(json.dumps({"time": struck_at}))
        for at, event, fields in events:
            Events(folder / "events.jsonl", wall_clock=partial(float, at)).add(event, **fields)
        return folder

    return make


def test_a_run_with_the_same_numbers_and_rollouts_is_good_however_long_it_took(make_run):
    slower = [METRICS[0] | {"time/eval_s": 9.0}, METRICS[1] | {"perf/tokens_per_s": 1.0}]
    recovered = [
        (110.0, "lost", {"role": "trainer"}),
        (130.0, "recovered", {"role": "trainer", "after_s": 20.5}),
    ]
    found = look_at(make_run("a", metrics=slower, events=recovered), reference=make_run("b"))
    assert found.is_good
    assert found.recovered_after_s == 30.0  # from the kill, of which nobody knew at first
    assert (found.num_lost, found.num_doubled, found.differences) == (0, 0, ())


def test_a_run_has_recovered_when_it_has_gone_back_where_it_had_to(make_run):
    events = [(90.0, "went_back", {}), (105.0, "resumed", {"step": 2}), (112.5, "went_back", {"to_step": 2})]
    found = look_at(make_run("a", events=events), reference=make_run("b"))
    assert found.recovered_after_s == 12.5


def test_numbers_that_differ_are_counted_and_the_first_is_told(make_run):
    other = [METRICS[0], METRICS[1] | {"loss/mean": -0.126, "loss/grad_norm": 1.5}]
    reference = make_run("b")
    found = look_at(make_run("a", metrics=other), reference=reference)
    assert not found.is_good
    assert found.differences == (
        "line 2: 2 of 3 numbers differ, loss/grad_norm is 1.5, in the undisturbed run nan",
    )
    assert differences(reference, make_run("c", metrics=METRICS[:1])) == [
        "1 lines, the undisturbed run has 2"
    ]


def test_rollouts_that_are_missing_or_twice_there_are_counted(make_run):
    reference = make_run("b")
    lost = look_at(make_run("a", rollouts=ROLLOUTS[:-1]), reference=reference)
    assert (lost.num_lost, lost.num_doubled, lost.is_good) == (1, 0, False)
    doubled = look_at(make_run("c", rollouts=[*ROLLOUTS, ROLLOUTS[0]]), reference=reference)
    assert (doubled.num_lost, doubled.num_doubled, doubled.is_good) == (0, 1, False)
    dropped = ROLLOUTS[0] | {"kind": "dropped"}
    assert look_at(make_run("d", rollouts=[*ROLLOUTS, dropped]), reference=reference).num_doubled == 0


def test_ahead_of_training_a_group_may_come_into_another_step_but_only_into_one(make_run):
    reference = make_run("b")
    later = [r | {"step": 2} for r in ROLLOUTS]
    moved = look_at(make_run("a", rollouts=later, metrics=[]), reference=reference, same_numbers=False)
    assert moved.is_good
    twice = look_at(make_run("c", rollouts=ROLLOUTS + later), reference=reference, same_numbers=False)
    assert twice.num_doubled == 4


@pytest.mark.parametrize("changed", [{"struck_at": None}, {"status": "running"}])
def test_a_run_that_nothing_was_done_to_or_that_did_not_finish_is_not_good(make_run, changed):
    assert not look_at(make_run("a", **changed), reference=make_run("b")).is_good


def test_the_table_has_a_row_a_case_and_the_summary_counts(make_run):
    reference = make_run("b")
    events = [(130.0, "recovered", {"role": "trainer", "after_s": 20.5})]
    outcomes = [
        Outcome(
            case=Case(number=number, fault=Fault(phase="push", victim=victim)),
            ended=Ended(statuses=statuses, run_s=60.0, timed_out=False),
            findings=look_at(folder, reference=reference),
            more_s=21.25,
        )
        for number, victim, statuses, folder in (
            (1, "trainer", (0,), make_run("a", events=events)),
            (2, "reward", (1,), make_run("c", status="running", rollouts=[], metrics=[])),
        )
    ]
    assert table(outcomes).splitlines()[2:] == [
        "| push | trainer | yes | 30.0 | 21.2 | 0 | 0 | yes |  |",
        "| push | reward | NO |  | 21.2 | 4 | 0 | NO | exit status 1 |",
    ]
    assert summary(outcomes) == {
        "cases": 2,
        "good": 1,
        "lost": 4,
        "doubled": 0,
        "unequal": 1,
        "slowest_recovery_s": {"trainer": 30.0},
        "bad": [{"phase": "push", "victim": "reward", "count": 1, "delay_s": 0.0}],
    }
