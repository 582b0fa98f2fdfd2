"""Files as strangers write them: numbers as written, no types inferred, every fault with its
place.
"""

import csv
import json
import os
import pickle
from itertools import islice

import datasets
import pytest

from rl.tasks.data import DifficultyFilter, read_rows
from rl.tasks.dataset import Columns, DatasetTask, is_correct
from rl.tasks.rows import _read_cells
from tests.support.scored import reply


@pytest.fixture
def problems(tmp_path):
    """Return a function that writes a file and returns its problems by question."""

    def _problems(content, *, name="rows.jsonl", **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        columns = Columns(**options.pop("columns", {}))
        config = DatasetTask.Config(
            train_files=(str(path),),
            columns=columns,
            cache_folder=str(tmp_path / "cache"),
            **options,
        )
        task = config.build()
        return {p.question: p for p in islice(task.train_problems(seed=0), len(task._train))}

    return _problems


def answers(problems):
    return {question: problem.answer for question, problem in problems.items()}


MIXED = [
    ("72", "72"),
    ("2.5", "2.5"),
    ("72.0", "72.0"),
    ("1e3", "1e3"),
    ("-0.10", "-0.10"),
    ("123456789012345678901234567890", "123456789012345678901234567890"),
    ('"00501"', "00501"),
    ('"2024-05-01"', "2024-05-01"),
    ('"None"', "None"),
    ('"72"', "72"),
]


@pytest.mark.parametrize(
    "form", ["lines", "array", "one line", "object", "pretty object", "utf-8 bom, crlf"]
)
def test_numbers_and_texts_of_json_are_answers_as_they_are_written(problems, form):
    rows = [f'{{"question": "q{i}", "answer": {written}}}' for i, (written, _) in enumerate(MIXED)]
    content, name = {
        "lines": ("\n\n".join(rows), "rows.jsonl"),
        "array": ("[\n" + ",\n".join(rows) + "\n]\n", "rows.json"),
        "one line": ("[" + ", ".join(rows) + "]", "rows.jsonl"),
        "object": ('{"version": 1, "data": [' + ",".join(rows) + "]}", "rows.json"),
        "pretty object": (
            '{\n "version": [1],\n "data": [\n' + ",\n".join(rows) + "\n]\n}",
            "rows.json",
        ),
        "utf-8 bom, crlf": (b"\xef\xbb\xbf" + "\r\n".join(rows).encode(), "rows.json"),
    }[form]
    found = problems(content, name=name)
    assert answers(found) == {f"q{i}": expected for i, (_, expected) in enumerate(MIXED)}
    assert is_correct(reply(found["q0"], "72"))


def test_change_of_type_after_any_number_of_rows_does_not_end_the_read(problems):
    long = "x" * 1000
    rows = [{"question": f"q{i}", "answer": i, "long": long} for i in range(12_000)]
    rows += [{"question": "last", "answer": "a text", "long": 5}]
    found = problems("".join(json.dumps(row) + "\n" for row in rows))
    assert (found["q11999"].answer, found["last"].answer, len(found)) == ("11999", "a text", 12_001)


CSV = (
    'question,answer,level\nq1,00501,1\n"q2, '
    '""or\nso""",None,\n\nq3,NA,NA\nq4,2024-05-01,3.0\nq5, 72 ,x\n'
)


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_csv_are_texts(problems, mark, end):
    content = CSV.replace(",", mark).replace(f"q2{mark}", "q2,").replace("\n", end)
    found = problems(
        b"\xef\xbb\xbf" + content.encode(), name="rows.csv", columns={"info": ("level",)}
    )
    asked = f'q2, "or{end}so"'
    assert answers(found) == {
        "q1": "00501",
        asked: "None",
        "q3": "NA",
        "q4": "2024-05-01",
        "q5": " 72 ",
    }
    assert [p.info["level"] for p in found.values() if p.question in ("q1", asked, "q4")].count(
        ""
    ) == 1
    assert found["q4"].info == {"level": "3.0"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('"question","answer"\n"a;b","1"\n', {"a;b": "1"}),
        ('"question";"answer"\n"a,b";"1,5"\n', {"a,b": "1,5"}),
        ('"question"\t"answer"\na\t1\n', {"a": "1"}),
        ("\n\nquestion,answer\na,1\n", {"a": "1"}),
        ("question,answer\ra,1\r\"b\rc\",2\r", {"a": "1", "b\rc": "2"}),
        ("question,answer,,\na,1,,\nb,2\nc,3,,,,\n,,,\n,\n", {"a": "1", "b": "2", "c": "3"}),
    ],
)  # fmt: skip
def test_csv_of_spreadsheets_and_databases_is_read(problems, content, expected):
    assert answers(problems(content, name="rows.csv")) == expected


def test_cells_that_a_row_lacks_are_empty(problems):
    columns = {"system": "role", "info": ("level",)}
    found = problems(
        "question,answer,role,level\nq1,1\nq2,2,be brief\n", name="rows.csv", columns=columns
    )
    assert dict(found["q1"].info) == {"level": ""}
    assert dict(found["q2"].info) == {"level": "", "system": "be brief"}


def test_nan_of_an_optional_column_is_none(problems):
    rows = '{"question": "q1", "answer": 1, "role": NaN, "steps": NaN, "rate": NaN}'
    columns = {"system": "role", "demonstration": "steps"}
    found = problems(rows, columns=columns, difficulty=DifficultyFilter(column="rate", max=0.9))
    assert (dict(found["q1"].info), found["q1"].demonstrations) == ({}, ())


def test_a_cell_may_be_as_long_as_a_solution(problems):
    assert answers(problems(f"question,answer\nq,{'x' * 200_000}\n", name="rows.csv")) == {
        "q": "x" * 200_000
    }


def test_reads_that_overlap_leave_the_limit_on_cells_as_it_was(tmp_path):
    file = tmp_path / "cells.csv"
    file.write_text("a,b\n1,2\n")
    before = csv.field_size_limit()
    first, second = _read_cells(file, ","), _read_cells(file, ",")
    assert next(first) == next(second) == (1, ["a", "b"])
    assert [*first] == [*second] == [(2, ["1", "2"])]
    assert csv.field_size_limit() == before


def test_info_keeps_the_values_of_json_and_missing_ones_are_none(problems):
    info = {"tests": [{"in": [1, 2.5], "out": None}], "big": 2**70, "ok": True}
    rows = [
        {"question": "q1", "answer": 1},
        {"question": "q2", "answer": 1, "info": info, "steps": ["a"]},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    columns = {"info": ("info", "answer"), "demonstration": "steps"}
    found = problems(content, columns=columns)
    assert found["q1"].info == {"info": None, "answer": 1}
    assert found["q2"].info == {"info": info, "answer": 1}
    assert (found["q1"].demonstrations, found["q2"].demonstrations) == ((), ("a",))


def test_pass_rates_of_csv_are_numbers(problems):
    content = "question,answer,rate\nq1,1,0.5\nq2,1,\nq3,1,1e0\n"
    difficulty = DifficultyFilter(column="rate", max=0.9)
    assert set(problems(content, name="rows.csv", difficulty=difficulty)) == {"q1", "q2"}


def test_file_that_changed_is_read_again(problems):
    assert answers(problems('{"question": "q", "answer": 1}')) == {"q": "1"}
    assert answers(problems('{"question": "q", "answer": 2}')) == {"q": "2"}


def line(**row):
    return json.dumps({"question": "q", "answer": "a", **row})


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"question": ["q"]},
            {},
            "rows.jsonl, row 2 (line 3): column 'question' is ['q'], not text",
        ),
        ({"answer": True}, {}, "row 2 (line 3): column 'answer' is True, not text"),
        ({"answer": {"a": 1}}, {}, "row 2 (line 3): column 'answer' is {'a': 1}, not text"),
        ({"answer": None}, {}, "row 2 (line 3): column 'answer' is None, not text"),
        ({"role": 5}, {"system": "role"}, "column 'role', the system message, is 5, not text"),
        (
            {"role": ["a"]},
            {"system": "role"},
            "column 'role', the system message, is ['a'], not text",
        ),
        ({"key": 1.5}, {"id": "key"}, "column 'key', the id, is 1.5, not a text or a whole number"),
        (
            {"key": {"a": 1}},
            {"id": "key"},
            "column 'key', the id, is {'a': 1}, not a text or a whole number",
        ),
        (
            {"key": False},
            {"id": "key"},
            "column 'key', the id, is False, not a text or a whole number",
        ),
        ({"key": None}, {"id": "key"}, "column 'key', the id, is empty"),
        (
            {"steps": [1, 2]},
            {"demonstration": "steps"},
            "column 'steps' is [1, 2], not a text or a list of",
        ),
        ({"steps": {"a": 1}}, {"demonstration": "steps"}, "column 'steps' is {'a': 1}, not text"),
    ],
)
def test_value_of_a_wrong_type_is_named_with_file_row_and_column(problems, row, columns, message):
    first = line(**dict.fromkeys(columns.values(), "x"))
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2") as caught:
        problems(f"{first}\n\n{line(**row)}\n", columns=columns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (f'{line()}\n\n{{"question": oops}}', "rows.jsonl", "cannot be read: line 3: Expecting "
                                                            "value"),
        ('{"question": oops}', "rows.jsonl", "cannot be read: line 1: Expecting value"),
        (f"{line()}\n[1]", "rows.jsonl", "line 2: '[1]' is not an object with named columns"),
        (f'{line()}\n{{"answer": 1, "answer": 2}}', "rows.jsonl", "line 2: an object has the name "
                                                                  "'answer' twice"),
        (line().encode() + b'\n{"question": "\xff"}', "rows.jsonl", "line 2 is not UTF-8 text"),
        (line().encode("utf-16"), "rows.jsonl", "line 1 is not UTF-8 text"),
        ("[" * 100_000, "rows.jsonl", "cannot be read: "),
        (f"[{line()}\n,\n{line()}", "rows.json", "cannot be read: "),
        ('{"train": [{"a": 1}], "test": [{"a": 1}]}', "rows.json", "arrays of objects are: "
                                                                   "'train', 'test'"),
        ("[]", "rows.json", "has no rows"),
        ("", "rows.jsonl", "has no rows"),
        ("question,answer\nq,1\nq,1,2\n", "rows.csv", "line 3: the row has 3 cells, but the first "
                                                      "line names 2"),
        ("question,answer\nq\n", "rows.csv", "row 1 (line 2): column 'answer' is '', not text"),
        ('question,answer\n"say \\"hi\\" now",1\n', "rows.csv", "line 2: ',' expected after '\"' "
                                                                "(a quote"),
        (f"[{line()}]\n[{line()}]", "rows.json", "Extra data: line 2 column 1"),
        (f"[{line()},]", "rows.json", "Expecting ',' or ']'"),
        (f'{{"data": [{line()}],\n"n": 1}} []', "rows.json", "Extra data: line 2 column 9"),
        ("question,answer,answer\nq,1,2\n", "rows.csv", "line 1: there are 2 columns 'answer'"),
        ('question,answer\nq,1\n"q,2\nq,3\n', "rows.csv", "line 3: unexpected end of data"),
        ("question;answr\nq;1\n", "rows.csv", "has no column 'question' (columns.question); its "
                                              "columns are 'qu"),
        ("question,answer\n", "rows.csv", "has no rows"),
        (b"question,answer\nq,\xe4\n", "rows.csv", "line 2 is not UTF-8 text"),
    ],
)  # fmt: skip
def test_malformed_file_is_one_line_that_names_the_place(problems, content, name, message):
    with pytest.raises(ValueError, match=name) as caught:
        problems(content, name=name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_narrow_numbers_of_parquet_have_the_digits_of_their_type(tmp_path):
    types = datasets.Features(question=datasets.Value("string"), answer=datasets.Value("float32"))
    rows = datasets.Dataset.from_dict(
        {"question": ["a", "b"], "answer": [0.1, 1e22]}, features=types
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    config = DatasetTask.Config(
        train_files=(str(tmp_path / "rows.parquet"),), cache_folder=str(tmp_path)
    )
    problems = config.build().train_problems(seed=0)
    assert {next(problems).answer for _ in range(2)} == {"0.1", "1e+22"}


def test_types_of_parquet_are_those_of_its_writer(tmp_path):
    rows = [{"question": "q1", "answer": 72.0}, {"question": "q2", "answer": None}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    config = DatasetTask.Config(
        train_files=(str(tmp_path / "rows.parquet"),), cache_folder=str(tmp_path)
    )
    with pytest.raises(
        ValueError, match=r"rows\.parquet, row 2: column 'answer' is None, not text"
    ):
        config.build()


def test_copy_that_cannot_be_written_names_the_setting(problems, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(
        ValueError, match=r"rows\.jsonl cannot be read: its copy .* \(task\.cache_folder\)"
    ):
        problems(line())


def test_edited_file_of_the_same_size_and_time_is_read_again(tmp_path):
    file = tmp_path / "rows.jsonl"
    read = []
    for answer in ("1", "2"):
        file.write_text(line(question="q", answer=answer))
        os.utime(file, ns=(0, 0))
        rows = read_rows(
            str(file), columns={"columns.answer": "answer"}, cache_folder=str(tmp_path)
        )
        read.append(rows[0]["answer"])
    assert read == ["1", "2"]


def test_pickled_rows_are_a_path(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(line(question=f"q{i}", answer="x" * 100) + "\n" for i in range(1000)))
    rows = read_rows(
        str(file), columns={"columns.question": "question"}, cache_folder=str(tmp_path)
    )
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[999] == rows[999] == {"question": "q999"}
