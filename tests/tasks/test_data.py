"""Rows of files, splits, order and pass rates."""

import json
from itertools import islice

import datasets
import pytest

from rl.rollouts.producer import NumberedProblems
from rl.tasks.data import (
    DifficultyFilter,
    hash_content,
    import_for_tasks,
    read_pass_rates,
    read_rows,
    shuffle_problems,
    write_pass_rates,
)
from rl.types import LoopPosition, Problem

ROWS = [{"q": "one", "a": 1}, {"q": "zwei\nü", "a": 2}, {"q": "three", "a": 3}]
COLUMNS = {"columns.question": "q", "columns.answer": "a"}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(str(path)),
    "rows.csv": lambda path, rows: datasets.Dataset.from_list(rows).to_csv(str(path)),
    "rows": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_in_order_and_by_number(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, [{**row, "unused": "x"} for row in ROWS])
    rows = read_rows(str(path), columns=COLUMNS, cache_folder=str(tmp_path / "cache"))
    is_typed = name in ("rows.parquet", "rows")
    expected = ROWS if is_typed else [{**row, "a": str(row["a"])} for row in ROWS]
    assert list(rows) == expected
    assert (len(rows), rows[2]) == (3, expected[2])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"q": "a"}\n\n{"q": oops}\n', "rows.jsonl cannot be read: "),
        ("rows.jsonl", '{"q": "a"}', "has no column 'a' (columns.answer); its columns are 'q'"),
        ("rows.txt", "text", "ends in '.txt', which is not one of .jsonl, .json, .parquet, .csv"),
        ("rows.parquet", "no parquet", "rows.parquet cannot be read"),
        ("folder", None, "folder cannot be read: "),
        ("missing", None, "is not a local file or folder"),
        ("all", None, "all holds several splits: name one of "),
    ],
)
def test_unreadable_source_is_refused(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    elif name == "folder":
        (tmp_path / name).mkdir()
    elif name == "all":
        part = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / name))
    with pytest.raises(ValueError, match=name) as caught:
        read_rows(str(tmp_path / name), columns=COLUMNS, cache_folder=str(tmp_path / "cache"))
    assert message in str(caught.value)


def test_key_is_the_same_in_every_run_and_ignores_repeated_white_space():
    assert hash_content(" 2 +  2 = ?\n") == hash_content("2 + 2 = ?") == 8487084148984385335
    assert hash_content("two words") != hash_content("twowords")


def problem_at(place):
    return Problem(id=str(place), question=f"question {place}", answer="")


def shuffled(*, seed="0", num_problems=10, shuffle=True):
    return shuffle_problems(problem_at, num_problems=num_problems, seed=seed, shuffle=shuffle)


def ids(problems, count):
    return [problem.id for problem in islice(problems, count)]


def test_every_epoch_has_every_problem_once_in_a_new_order():
    drawn = ids(shuffled(), 30)
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i) for i in range(10)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert drawn == ids(shuffled(), 30) != ids(shuffled(seed="1"), 30)
    assert ids(shuffled(shuffle=False, num_problems=3), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_continued_run_asks_only_for_the_problems_it_needs():
    asked = []

    def counted(place):
        asked.append(place)
        return problem_at(place)

    whole = list(islice(NumberedProblems(shuffled(num_problems=1000)), 805))
    position = LoopPosition(step=3, num_problems=800, outstanding=(790, 12))
    problems = NumberedProblems(shuffle_problems(counted, num_problems=1000, seed="0"), position)
    first = list(islice(problems, 7))
    assert [number for number, _ in first] == [12, 790, 800, 801, 802, 803, 804]
    assert first == [whole[number] for number, _ in first]
    assert len(asked) == 7
    # An outstanding problem stays outstanding until it is given again.
    once_more = NumberedProblems(shuffled(num_problems=1000), position)
    assert next(once_more)[0] == 12
    assert once_more.make_position(4, outstanding=()) == LoopPosition(
        step=4, num_problems=800, outstanding=(790,)
    )


@pytest.mark.parametrize(
    ("rate", "kept"),
    [(0.0, False), (0.1, True), (0.5, True), (0.9, True), (1, False), (None, True)],
)
def test_rates_within_the_bounds_are_kept(rate, kept):
    assert DifficultyFilter(column="rate", min=0.1, max=0.9).is_within_bounds(rate) is kept


def test_rates_that_are_written_are_read_again(tmp_path):
    rates = {"train.jsonl:1": 0.125, 'ü "quoted"': 1.0, "a\u2028line": 0.5}
    write_pass_rates(tmp_path / "rates.jsonl", rates)
    assert read_pass_rates(str(tmp_path / "rates.jsonl")) == rates
    assert [path.name for path in tmp_path.iterdir()] == ["rates.jsonl"]
    (tmp_path / "by_number.jsonl").write_text('{"id": 7, "pass_rate": 1, "num": 4}\n\n')
    assert read_pass_rates(str(tmp_path / "by_number.jsonl")) == {"7": 1.0}
    with pytest.raises(ValueError, match="the pass rate nan is not a number from 0 to 1"):
        write_pass_rates(tmp_path / "rates.jsonl", {"a": float("nan")})
    assert read_pass_rates(str(tmp_path / "rates.jsonl")) == rates


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b"}', "line 2: not an 'id' with a 'pass_rate': 'pass_rate'"),
        ("3", "line 2: not an 'id' with a 'pass_rate': "),
        ('{"id": "a", "pass_rate": 1}', "line 2: problem 'a' is rated twice"),
        (
            '{"id": "b", "pass_rate": 2}',
            "line 2: not an 'id' with a 'pass_rate': the pass rate 2 is not",
        ),
        ("{", "line 2: not an 'id'"),
    ],
)
def test_malformed_line_of_rates_is_named(tmp_path, line, message):
    file = tmp_path / "rates.jsonl"
    file.write_text('{"id": "a", "pass_rate": 0}\n' + line)
    with pytest.raises(ValueError, match=r"rates\.jsonl, ") as caught:
        read_pass_rates(str(file))
    assert message in str(caught.value)


def test_missing_package_says_what_installs_it():
    with pytest.raises(
        ValueError, match=r"^this needs the package 'no_such_package', .*setup_env.py tasks"
    ):
        import_for_tasks("no_such_package.part", needed_by="this")
