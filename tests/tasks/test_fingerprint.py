"""Fingerprints of problems: what a change of data, settings or seed looks like to a checkpoint."""

import dataclasses
import json

import pytest

from rl.tasks.dataset import Columns, DatasetTask
from rl.tasks.fingerprint import describe_changes, hash_problem, make_fingerprint
from rl.tasks.sum_digits import SumDigits
from rl.types import Problem

ROWS = [{"question": f"question {i}", "answer": str(i), "level": i} for i in range(100)]


@pytest.fixture
def build(tmp_path):
    def _build(rows, **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = Columns(info=("level",))
        options = {"columns": columns, "cache_folder": str(tmp_path / "cache"), **options}
        return DatasetTask.Config(train_files=(str(file),), **options).build()

    return _build


def changed(rows, place, **values):
    return [{**row, **values} if i == place else row for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (ROWS, []),
        (
            [{**ROWS[0], "question": "new"}, *ROWS],
            ["100 training problems, now 101", "the first difference is problem 1 (rows.jsonl:1)"],
        ),
        (changed(ROWS, 57, answer="57.0"), ["the first difference is problem 58 (rows.jsonl:58)"]),
        (changed(ROWS, 99, level=1.5), ["the first difference is problem 100 (rows.jsonl:100)"]),
        (ROWS[:90], ["100 training problems, now 90", "the first difference is problem 91"]),
        (
            [*ROWS, {**ROWS[0], "question": "new"}],
            [
                "100 training problems, now 101",
                "the first difference is problem 101 (rows.jsonl:101)",
            ],
        ),
        ([ROWS[1], ROWS[0], *ROWS[2:]], ["the first difference is problem 1 (rows.jsonl:1)"]),
    ],
)
def test_change_of_rows_is_named_by_number_and_place(build, rows, changes):
    saved = make_fingerprint(build(ROWS), seed=0)
    assert describe_changes(saved, build(rows), seed=0) == (changes, [])


def test_change_of_order_is_a_change(build):
    saved = make_fingerprint(build(ROWS), seed=0)
    changes, _ = describe_changes(saved, build(ROWS), seed=1)
    assert changes == [
        "they were shuffled by seed 'train 0', and are shuffled by seed 'train 1' now"
    ]
    changes, _ = describe_changes(saved, build(ROWS, shuffle=False), seed=0)
    assert changes == ["they were shuffled by seed 'train 0', and are in the order of the rows now"]
    assert describe_changes(
        make_fingerprint(build(ROWS, shuffle=False), seed=0), build(ROWS), seed=0
    )[0]


def test_change_of_the_system_message_is_a_change(build):
    saved = make_fingerprint(build(ROWS, system="Be brief."), seed=0)
    changes, _ = describe_changes(saved, build(ROWS, system="Be long."), seed=0)
    assert changes[0].startswith("the first difference is problem 1 ")
    assert describe_changes(saved, build(ROWS, system="Be brief."), seed=0) == ([], [])


def test_change_of_an_evaluation_set_is_told_apart(build):
    saved = make_fingerprint(build(ROWS, held_out=0.2), seed=0)
    _, sets = describe_changes(saved, build(ROWS, held_out=0.2, num_eval=5), seed=0)
    (told,) = sets
    assert told.startswith("evaluation set 'held_out': ")
    assert ", now 5 problems " in told


def test_fingerprint_of_many_rows_stays_small_and_finds_the_block(build):
    rows = [{**ROWS[0], "question": f"question {i}"} for i in range(1000)]
    saved = make_fingerprint(build(rows), seed=0)
    assert (saved.num, saved.block, len(saved.digests)) == (1000, 4, 250)
    assert len(json.dumps(dataclasses.asdict(saved))) < 10_000
    changes, _ = describe_changes(saved, build(changed(rows, 701, answer="new")), seed=0)
    assert changes == ["the first difference is in problems 701 to 704"]
    changes, _ = describe_changes(saved, build(rows[:10]), seed=0)
    assert changes[0] == "1000 training problems, now 10"


def test_endless_tasks_are_compared_by_their_first_problems():
    task = SumDigits.Config(num_integers=2).build()
    saved = make_fingerprint(task, seed=0)
    assert (saved.num, saved.block, len(saved.digests)) == (None, 1, 64)
    assert describe_changes(saved, SumDigits.Config(num_integers=2).build(), seed=0) == ([], [])
    changes, sets = describe_changes(saved, SumDigits.Config(num_integers=3).build(), seed=0)
    assert changes[0].startswith("the first difference is problem 1 (sum-digits/")
    assert len(sets) == 1
    changes, sets = describe_changes(saved, task, seed=1)
    assert changes[0] == "they were drawn by seed 0, and are drawn by seed 1 now"
    assert sets == []


def test_objects_without_text_of_their_own_are_the_same_in_each_process():
    class Picture:
        """Its repr has its address."""

    first, second = Picture(), Picture()
    assert repr(first) != repr(second)
    problem = Problem(id="1", question="q", answer="a")
    assert hash_problem(problem, [first]) == hash_problem(problem, [second])
    assert hash_problem(problem, [first]) != hash_problem(problem, [None])
