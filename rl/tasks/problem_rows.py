"""Rows as problems: read and checked once, made again whenever one is asked for.

Only the numbers of the rows that are used are kept, and a hash of what each asks; the rows stay in their
memory-mapped tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rl.data.difficulty import DifficultyFilter, PassRates
from rl.data.rows import Rows, read_rows
from rl.data.split import choose, content_key, is_held_out
from rl.types import Problem

logger = logging.getLogger(__name__)

Convert = Callable[[Problem, Mapping[str, Any]], Problem]
"""What the model is asked, of a problem as the columns have it, and of its row."""


@dataclass(kw_only=True, slots=True)
class Columns:
    """Which column has what."""

    question: str = "question"
    answer: str | None = "answer"
    """None where the rows have none, because the grader needs none."""
    id: str | None = None
    """Unique in all files. None: the file's name and the row's number."""
    demonstration: str | None = None
    """A full reply, for the warm-up; a list of texts is one of several turns."""
    system: str | None = None
    """A system message before the question."""
    info: tuple[str, ...] = ()
    """Further columns, for `Problem.info`: what a reward function or an environment wants to know."""

    def by_setting(self) -> dict[str, str]:
        """Every column that is named, by the setting that names it."""
        single = ("question", "answer", "id", "demonstration", "system")
        named = {f"columns.{name}": getattr(self, name) for name in single}
        return {
            **{setting: column for setting, column in named.items() if column is not None},
            **{f"columns.info.{i}": column for i, column in enumerate(self.info)},
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowFile:
    """One file, and how its rows are named."""

    name: str
    """Of the rows' ids."""
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProblemRows:
    """Some rows of some files, as problems."""

    reader: RowReader
    files: Sequence[RowFile]
    places: Sequence[tuple[int, int]]
    """File and row of each, from 0."""
    keys: Sequence[int]
    """What each asks, hashed."""

    def __len__(self) -> int:
        return len(self.places)

    def problem(self, index: int) -> Problem:
        number, row = self.places[index]
        file = self.files[number]
        return self.reader.problem(file, row, file.rows[row])

    def row(self, index: int) -> Mapping[str, Any]:
        number, row = self.places[index]
        return self.files[number].rows[row]

    def kept(self, indices: Iterable[int]) -> ProblemRows:
        kept = list(indices)
        return replace(self, places=[self.places[i] for i in kept], keys=[self.keys[i] for i in kept])

    def divided(self, *, share: float) -> tuple[ProblemRows, ProblemRows]:
        """The held-out ones, and the others."""
        held = [is_held_out(key, share=share) for key in self.keys]
        return (
            self.kept(i for i, is_held in enumerate(held) if is_held),
            self.kept(i for i, is_held in enumerate(held) if not is_held),
        )

    def without(self, keys: set[int]) -> ProblemRows:
        return self.kept(i for i, key in enumerate(self.keys) if key not in keys)

    def chosen(self, most: int | None) -> ProblemRows:
        """At most so many, whatever the seed."""
        return self.kept(choose(self.keys, most))

    def with_demonstration(self) -> ProblemRows:
        column = self.reader.columns.demonstration
        return self.kept(i for i in range(len(self)) if column is not None and self.row(i)[column])


@dataclass(kw_only=True, slots=True)
class RowReader:
    """Makes problems of rows, and refuses those that are none."""

    columns: Columns
    difficulty: DifficultyFilter | None
    cache_folder: str | None
    names: Mapping[str, str]
    """Of the files that are read, by path: what their rows' ids begin with."""
    convert: Convert
    usable: Callable[[Problem], bool]
    _seen: dict[str, str] = field(default_factory=dict)
    """Where each id was met."""

    def read(self, paths: Sequence[str], *, also: str = "train_files") -> ProblemRows:
        """Every usable row of the files; `also` is the setting that names them.

        Raises:
            ValueError: names the file and the row, or the column.
        """
        needed = self.columns.by_setting()
        if self.difficulty is not None and self.difficulty.column is not None and also == "train_files":
            needed["difficulty.column"] = self.difficulty.column
        files, places, keys, num_rows = [], [], [], 0
        for path in paths:
            rows = read_rows(path, columns=needed, cache_folder=self.cache_folder)
            file = RowFile(name=self.names[path], rows=rows)
            files.append(file)
            for number, row in enumerate(rows):
                num_rows += 1
                problem = self.problem(file, number, row)
                self._check_id(problem.id, rows.where(number))
                with _naming(rows, number):
                    if not self.usable(problem):
                        continue
                places.append((len(files) - 1, number))
                keys.append(content_key(row[self.columns.question]))
        if not places:
            raise ValueError(f"{also}: none of the {num_rows} rows of {', '.join(paths)} can be used")
        if num_rows > len(places):
            logger.warning("%s: %d of %d rows cannot be used", also, num_rows - len(places), num_rows)
        return ProblemRows(reader=self, files=files, places=places, keys=keys)

    def problem(self, file: RowFile, number: int, row: Mapping[str, Any]) -> Problem:
        """Raises ValueError for a row without a question or an answer; it names file and row."""
        columns = self.columns
        where = file.rows.where(number)
        info = {name: row[name] for name in columns.info}
        if columns.system is not None and row[columns.system]:
            info["system"] = _text(row[columns.system], column=columns.system, where=where)
        problem_id = f"{file.name}:{number + 1}" if columns.id is None else row[columns.id]
        if problem_id is None or problem_id == "":
            raise ValueError(f"{where}: column {columns.id!r}, the id, is empty")
        problem = Problem(
            id=str(problem_id),
            question=_text(row[columns.question], column=columns.question, where=where),
            answer=""
            if columns.answer is None
            else _answer(row[columns.answer], column=columns.answer, where=where),
            demonstration=""
            if columns.demonstration is None
            else _demonstration(row[columns.demonstration], column=columns.demonstration, where=where),
            info=info,
        )
        with _naming(file.rows, number):
            return self.convert(problem, row)

    def _check_id(self, problem_id: str, where: str) -> None:
        if problem_id in self._seen:
            raise ValueError(
                f"{where}: id {problem_id!r} is also that of {self._seen[problem_id]}; ids must be unique in "
                f"all files (columns.id={self.columns.id!r})"
            )
        self._seen[problem_id] = where


def drop_by_difficulty(rows: ProblemRows, settings: DifficultyFilter) -> ProblemRows:
    """Rows that pass the filter.

    Raises:
        ValueError: a rate is none (names the row), or the file of rates has not one of these problems.
    """
    rates = PassRates(settings)
    ids = [rows.problem(i).id for i in range(len(rows))]
    if ids and not rates.num_matched(set(ids)):
        raise ValueError(
            f"difficulty.file={settings.file!r} rates none of the training problems, whose ids are such as "
            f"{ids[0]!r}"
        )
    kept = []
    for i, problem_id in enumerate(ids):
        number, row = rows.places[i]
        with _naming(rows.files[number].rows, row):
            if rates.keeps(problem_id, rows.row(i) if settings.column is not None else {}):
                kept.append(i)
    return rows.kept(kept)


@contextmanager
def _naming(rows: Rows, number: int) -> Iterator[None]:
    """What is wrong with a row says which one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{rows.where(number)}: {error}") from error


def _text(value: Any, *, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} is {value!r}, not text")
    if not value.strip():
        raise ValueError(f"{where}: column {column!r} is empty")
    return value


def _answer(value: Any, *, column: str, where: str) -> str:
    """Numbers are answers too."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _text(value, column=column, where=where)


def _demonstration(value: Any, *, column: str, where: str) -> str | tuple[str, ...]:
    """Rows without one are not warmed up on."""
    if not value:
        return ""
    if isinstance(value, list):
        return tuple(_text(part, column=column, where=where) for part in value)
    return _text(value, column=column, where=where)
