import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from rl.data.rows import distinct_names, read_rows

ROOT = Path(__file__).parent.parent.parent
ROWS = [{"q": "one", "a": 1}, {"q": "zwei\nü", "a": 2}, {"q": "three", "a": 3}]
COLUMNS = {"columns.question": "q", "columns.answer": "a"}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path, rows):
    path.write_text(json.dumps(rows))


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def write_csv(path, rows):
    datasets.Dataset.from_list(rows).to_csv(str(path))


def write_folder(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(str(path))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_jsonl),
        ("rows.json", write_json),
        ("rows.parquet", write_parquet),
        ("rows.csv", write_csv),
        ("rows", write_folder),
    ],
)
def test_every_format_gives_the_same_rows_in_order_and_by_number(tmp_path, name, write):
    path = tmp_path / name
    write(path, [{**row, "unused": "x"} for row in ROWS])
    rows = read_rows(str(path), columns=COLUMNS, cache_folder=str(tmp_path / "cache"))
    assert [dict(row) for row in rows] == ROWS
    assert (len(rows), dict(rows[2]), rows.where(2)) == (3, ROWS[2], f"{path}, row 3")


def refusal(path, *, columns=COLUMNS):
    with pytest.raises(ValueError, match=r".") as caught:
        read_rows(str(path), columns=columns, cache_folder=str(Path(path).parent / "cache"))
    return str(caught.value)


def test_a_path_that_is_not_on_this_machine_is_refused():
    assert "'openai/gsm8k' is no local file or folder" in refusal("openai/gsm8k")


def test_a_missing_column_lists_those_that_are_there(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    message = refusal(tmp_path / "rows.jsonl", columns={"columns.question": "question"})
    assert message.endswith("has no column 'question' (columns.question); its columns are 'q', 'a'")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "rows.jsonl",
            '{"q": "a"}\n\n{"q": oops}\n',
            "line 3: not JSON (Expecting value at character 7): '{",
        ),
        ("rows.jsonl", '{"q": "a"}\n[1, 2]\n', "line 2: not a JSON object of columns: '[1, 2]'"),
        ("rows.json", '[{"q": "a"},\n {"q": }]', "line 2: not JSON"),
        ("rows.jsonl", "", "has no rows"),
        ("rows.txt", "text", "ends in '.txt', which is not one of .jsonl, .json, .parquet, .csv"),
        ("rows.parquet", "no parquet", "rows.parquet cannot be read"),
    ],
)
def test_what_cannot_be_read_says_where(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    message = refusal(tmp_path / name)
    assert name in message
    assert said in message


def test_bytes_that_are_no_utf8_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"q": "a"}\n{"q": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, between rows 1 and 2: not UTF-8"):
        list(read_rows(str(tmp_path / "rows.jsonl"), columns={"q": "q"}, cache_folder=str(tmp_path)))


def test_a_folder_of_several_splits_names_them(tmp_path):
    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "all"))
    message = refusal(tmp_path / "all")
    assert "holds several splits" in message
    assert str(tmp_path / "all" / "test") in message


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    assert "not one that datasets.Dataset.save_to_disk wrote" in refusal(tmp_path / "folder")


def test_names_of_files_are_short_unless_two_are_alike():
    assert distinct_names(["a/train.jsonl", "b/test.jsonl"]) == {
        "a/train.jsonl": "train.jsonl",
        "b/test.jsonl": "test.jsonl",
    }
    alike = ["a/train.jsonl", "b/train.jsonl"]
    assert distinct_names(alike) == {name: name for name in alike}


READ_WITHOUT_NETWORK = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print("asked the network:", event, args)
sys.addaudithook(refuse)
from rl.data.rows import read_rows
print(len(read_rows(sys.argv[1], columns={"columns.question": "q"}, cache_folder=sys.argv[2])))
try:
    read_rows("openai/gsm8k", columns={})
except ValueError:
    print("refused")
"""


@pytest.mark.medium
def test_nothing_is_asked_of_the_network(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    argv = [sys.executable, "-c", READ_WITHOUT_NETWORK, str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["3", "refused", ""]
