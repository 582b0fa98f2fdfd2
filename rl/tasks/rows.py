"""Rows of JSON and CSV files as they are written: 72.0 stays 72.0, 00501 stays 00501.

A file is read once, line by line, into an Arrow copy with the JSON of each row, which is mapped
into memory: the file may be larger than memory, any row can be read directly, and a change of the
file cannot reach a run under way. Types are never inferred; each reader of a row decides what it
takes.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl.utils.files import replace_file

FORMAT = 1
"""Version of the copies; part of their names."""
DELIMITERS = ",;\t|"
"""Characters between the cells of a CSV file, the usual one first."""
BATCH_BYTES = 1 << 22
"""Size of the parts in which a copy is written."""
WHITE = " \t\r\n"
_WHITE = re.compile(f"[{WHITE}]*")
_LINE_OF_CSV = re.compile(r"[^\r]*\r\n?|[^\r]+")
"""Lines end at a carriage return too; a cell in quotes may have some."""


class WrittenNumber(str):
    """A number of a JSON text, as it is written there."""

    __slots__ = ()

    @property
    def value(self) -> int | float:
        number: int | float = json.loads(self)
        return number


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRow:
    """A row of a file: its first line, counted from 1, and its JSON."""

    line: int
    text: str


class WrittenRows:
    """Rows of a JSON or CSV file; numbers in them are `WrittenNumber`s.

    A pickle holds the path of the copy.
    """

    def __init__(self, copy: Path, columns: Sequence[str]) -> None:
        """Open a copy; `columns` are the needed ones, and a row without one has None there."""
        pa: Any = importlib.import_module("pyarrow")
        self.copy = copy
        self.columns = columns
        self.table = pa.ipc.open_stream(pa.memory_map(str(copy))).read_all()
        """Arrow table of lines and texts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WrittenRows, (self.copy, self.columns)

    def list_columns(self, needed: Iterable[str] = ()) -> list[str]:
        """Return the columns of the first row, or of all rows if the first lacks a needed one."""
        objects = self.read_objects()
        names = dict.fromkeys(next(objects, {}))
        if {*needed} - names.keys():
            for row in objects:
                names |= dict.fromkeys(row)
        return list(names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._select_needed(read_object(self.table.column("text")[number].as_py()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._select_needed, self.read_objects())

    def read_objects(self) -> Iterator[dict[str, Any]]:
        """Yield all rows with all of their columns."""
        for batch in self.table.to_batches():
            for text in batch.column("text"):
                yield read_object(text.as_py())

    def _select_needed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: get_cell(row, name) for name in self.columns}

    def place(self, number: int) -> str:
        """Return where a row is in the file, as its reader counts."""
        line = self.table.column("line")[number].as_py()
        return f"row {number + 1}" if line == number + 1 else f"row {number + 1} (line {line})"


def get_cell(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's value in a column, or in a field of its objects: `reward_model.ground_truth`.

    None for what is not there.
    """
    name, dot, rest = column.partition(".")
    if column in row or not dot:
        return row.get(column)
    inner = row.get(name)
    return get_cell(inner, rest) if isinstance(inner, Mapping) else None


def read_written_rows(path: Path, *, columns: Sequence[str], folder: Path) -> WrittenRows:
    """Return the rows of a .jsonl, .json or .csv file; `folder` receives their copy.

    Raises:
        ValueError: names the line that cannot be read, or the copy that cannot be written.
    """
    file, is_csv = path.resolve(), path.suffix == ".csv"
    with file.open("rb") as content:
        # Not the file's time: an edit within the clock's resolution would be read from the old
        # copy.
        digest = hashlib.file_digest(content, "blake2b").hexdigest()
    # The needed columns tell the delimiter of a CSV file, so the copy depends on them.
    about = [FORMAT, str(file), path.suffix, digest]
    about += sorted(columns) if is_csv else []
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()
    copy = folder / f"relay-rows-{key}.arrow"
    # Both read lazily: nothing is read again where there is a copy.
    if is_csv:
        rows = _read_csv(file, columns)
    else:
        rows = _read_json(file, may_be_object=path.suffix == ".json")
    if not copy.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(copy) as temporary:
                _write(temporary, rows)
        except OSError as error:
            raise ValueError(
                f"its copy {copy} cannot be written (task.cache_folder): {error}"
            ) from error
    return WrittenRows(copy, columns)


def read_object(text: str) -> dict[str, Any]:
    """Return a JSON object, with its numbers as they are written.

    Raises ValueError for anything else.
    """
    decoded = _DECODER.decode(text)
    if not isinstance(decoded, dict):
        raise ValueError(f"{text.strip()[:40]!r} is not an object with named columns")
    return decoded


def to_plain(value: Any) -> Any:
    """Return a value of JSON as `json.loads` gives it, without `WrittenNumber`s."""
    if isinstance(value, WrittenNumber):
        return value.value
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    # Python would keep the last value of a name, without a word.
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"an object has the name {twice!r} twice")


_DECODER = json.JSONDecoder(
    parse_int=WrittenNumber, parse_float=WrittenNumber, object_pairs_hook=_make_object
)


def _write(copy: Path, rows: Iterable[WrittenRow]) -> None:
    # In parts, so that a file larger than memory can be copied.
    pa: Any = importlib.import_module("pyarrow")
    schema = pa.schema([("line", pa.int64()), ("text", pa.large_string())])
    with pa.OSFile(str(copy), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        part: list[WrittenRow] = []
        num_bytes = 0
        for row in rows:
            part.append(row)
            num_bytes += len(row.text)
            if num_bytes > BATCH_BYTES:
                writer.write_batch(_batch(part, schema))
                part, num_bytes = [], 0
        if part:
            writer.write_batch(_batch(part, schema))


def _batch(rows: Sequence[WrittenRow], schema: Any) -> Any:
    pa: Any = importlib.import_module("pyarrow")
    lines, texts = [], []
    for row in rows:
        lines.append(row.line)
        texts.append(row.text)
    return pa.record_batch([lines, texts], schema=schema)


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Return each line with its number, from 1; raise ValueError for one that is not UTF-8."""
    with file.open("rb") as content:
        for number, line in enumerate(content, start=1):
            # The first line may begin with the byte order mark that Windows writes.
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} is not UTF-8 text: {error}") from error


def read_filled_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not blank, with their numbers.

    Raises ValueError as `read_written_rows`.

    Only a line feed ends a line: JSON may have other separators of lines in its texts.
    """
    for number, line in _read_lines(file):
        if line.strip(WHITE):
            yield number, line


@contextmanager
def _name_line(line: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {line}: {error}") from error


# JSON


def _read_json(file: Path, *, may_be_object: bool) -> Iterator[WrittenRow]:
    """Return the rows of JSON lines, of an array, or of an object's only array of objects."""
    if _is_document(file, may_be_object=may_be_object):
        yield from _read_document(file)
        return
    for number, line in read_filled_lines(file):
        with _name_line(number):
            read_object(line)
        yield WrittenRow(line=number, text=line.strip(WHITE))


def _is_document(file: Path, *, may_be_object: bool) -> bool:
    """Return True for a file that is one JSON text, rather than one on each line."""
    lines = read_filled_lines(file)
    _, first = next(lines, (0, ""))
    if first.lstrip(WHITE).startswith("["):
        return True
    if not may_be_object or not first.lstrip(WHITE).startswith("{"):
        return False
    try:
        decoded = read_object(first)
    except (ValueError, RecursionError):
        return True  # it goes on in the next line
    return any(map(_is_array_of_objects, decoded.values())) and next(lines, None) is None


def _read_document(file: Path) -> Iterator[WrittenRow]:
    # The decoder needs the whole text, unlike JSON lines, of which one is in memory at a time.
    text = "".join(line for _, line in _read_lines(file))
    outer = _skip_white(text, 0)
    array = outer if text[outer] == "[" else _begin_of_array(text, outer)
    number, counted, end = 1, 0, array + 1
    for begin, end in _iterate_elements(text, array):
        number += text.count("\n", counted, begin)
        counted = begin
        with _name_line(number):
            read_object(text[begin:end])
        yield WrittenRow(line=number, text=text[begin:end])
    if array == outer:
        _check_end(text, _skip_white(text, end) + 1)


def _check_end(text: str, place: int) -> None:
    rest = _skip_white(text, place)
    if rest < len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def _begin_of_array(text: str, begin: int) -> int:
    """Return the place of the only array of objects in the object that begins here.

    That object must be all of the text.
    """
    _, end = _DECODER.raw_decode(text, begin)  # the search may rely on an object that is whole
    _check_end(text, end)
    names, places = [], []
    for name, place, value in _iterate_members(text, begin):
        if _is_array_of_objects(value):
            names.append(repr(name))
            places.append(place)
    if len(places) != 1:
        raise ValueError(
            "an object must hold one array of rows, but its arrays of objects are: "
            f"{', '.join(names) or 'none'}"
        )
    return places[0]


def _is_array_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _iterate_members(text: str, begin: int) -> Iterator[tuple[str, int, Any]]:
    """Yield name, place and value of each member of the object that begins here."""
    place = _skip_white(text, begin + 1)
    # The text was decoded before, so every mark is where it must be.
    while text[place] != "}":
        name, place = _DECODER.raw_decode(text, place)
        place = _skip_white(text, _skip_white(text, place) + 1)
        value, end = _DECODER.raw_decode(text, place)
        yield name, place, value
        place = _skip_white(text, end)
        if text[place] == ",":
            place = _skip_white(text, place + 1)


def _iterate_elements(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """Yield the limits of each element of the array that begins here."""
    place = _skip_white(text, begin + 1)
    while text[place : place + 1] != "]":
        _, end = _DECODER.raw_decode(text, place)
        yield place, end
        place = _skip_white(text, end)
        is_next = text[place : place + 1] == ","
        if is_next:
            place = _skip_white(text, place + 1)
        if is_next == (text[place : place + 1] == "]"):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, place)


def _skip_white(text: str, place: int) -> int:
    white = _WHITE.match(text, place)
    assert white is not None  # the pattern matches everywhere
    return white.end()


# CSV


def _read_csv(file: Path, columns: Sequence[str]) -> Iterator[WrittenRow]:
    """Return the rows of a CSV file whose first line names the columns; every cell is a text."""
    delimiter = _find_delimiter(file, columns)
    rows = _read_cells(file, delimiter)
    first, header = next(rows, (1, []))
    for name in columns:
        if header.count(name) > 1:
            raise ValueError(f"line {first}: there are {header.count(name)} columns {name!r}")
    for number, cells in rows:
        # Spreadsheets leave out empty cells at the end of some rows, and add some to others.
        if any(cells[len(header) :]):
            raise ValueError(
                f"line {number}: the row has {len(cells)} cells, but the first line names "
                f"{len(header)} columns"
            )
        named = dict(zip_longest(header, cells[: len(header)], fillvalue=""))
        yield WrittenRow(line=number, text=json.dumps(named, ensure_ascii=False))


def _find_delimiter(file: Path, columns: Sequence[str]) -> str:
    """Return the delimiter under which the first line has the needed columns, else a comma."""
    for mark in DELIMITERS:
        # Names in quotes cannot be read with another delimiter than theirs.
        with suppress(ValueError):
            _, header = next(_read_cells(file, mark), (1, []))
            # Where none is needed, the first one that divides the line.
            if {*columns} <= {*header} and (columns or len(header) > 1):
                return mark
    return DELIMITERS[0]


def _read_cells(file: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row that is not empty, with its first line."""
    number = 1

    def lines() -> Iterator[str]:
        for _, line in _read_lines(file):
            yield from _LINE_OF_CSV.findall(line)

    # Strict: a quote in the middle of a cell would otherwise be taken as it is.
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            with _allow_long_cells():
                cells = next(reader, None)
        except csv.Error as error:
            hint = ""
            if "after" in str(error):
                hint = " (a quote inside a quoted cell is written twice)"
            raise ValueError(f"line {number}: {error}{hint}") from error
        if cells is None:
            return
        if any(cells):
            yield number, cells


_LIMIT_OF_CELLS = threading.Lock()


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    """Lift the limit on a cell, which belongs to the whole process, while one row is read."""
    with _LIMIT_OF_CELLS:
        limit = csv.field_size_limit(sys.maxsize)  # a cell may be a long solution
        try:
            yield
        finally:
            csv.field_size_limit(limit)
