"""Rows of a local file, by number: JSON lines, JSON, Parquet, CSV, or a folder that `datasets` saved.

Hugging Face `datasets` reads them into Arrow tables that are mapped into memory, so that a file may be larger
than memory and any row is as near as any other. Nothing is fetched: a path that is not there is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.packages import import_for_tasks

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file, and what `datasets` calls the reader of it."""
BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """All rows of one file, of the columns that were asked for."""

    path: str
    """As it was given."""
    table: Any
    """A `datasets.Dataset`."""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self.table[number]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Every row in order, read in batches.

        Raises:
            ValueError: text that is not UTF-8.
        """
        batches = self.table.iter(batch_size=BATCH_ROWS)
        number = 0
        while True:
            try:
                batch = next(batches, None)
            except UnicodeDecodeError as error:
                last = min(number + BATCH_ROWS, len(self))
                raise ValueError(
                    f"{self.path}, between rows {number + 1} and {last}: not UTF-8: {error}"
                ) from error
            if batch is None:
                return
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))
                number += 1

    def where(self, number: int) -> str:
        """What an error calls a row: rows are counted from 1."""
        return f"{self.path}, row {number + 1}"


def read_rows(path: str, *, columns: Mapping[str, str], cache_folder: str | None = None) -> Rows:
    """The rows of a file, or of a folder of `Dataset.save_to_disk`.

    Args:
        columns: the columns that are needed, by the setting that names each.
        cache_folder: where `datasets` keeps its Arrow copy of a file; None: its own default.

    Raises:
        ValueError: there is no such local file, it cannot be read (file and line, as far as they are known),
            it has no rows, or a column is missing (lists those that are there).
    """
    datasets = import_for_tasks("datasets", needed_by=f"reading {path}")
    local = Path(path).expanduser()
    if not local.exists():
        raise ValueError(
            f"{path!r} is no local file or folder: data is read from this machine alone, so download it first"
        )
    table = _load_folder(datasets, local) if local.is_dir() else _load_file(datasets, local, cache_folder)
    if not len(table):
        raise ValueError(f"{path} has no rows")
    for setting, column in columns.items():
        if column not in table.column_names:
            present = ", ".join(map(repr, table.column_names))
            raise ValueError(f"{path} has no column {column!r} ({setting}); its columns are {present}")
    return Rows(path=path, table=table.select_columns(sorted(set(columns.values()))))


def _load_folder(datasets: Any, folder: Path) -> Any:
    try:
        table = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{folder} is a folder, but not one that datasets.Dataset.save_to_disk wrote: {error}"
        ) from error
    if isinstance(table, Mapping):
        names = ", ".join(str(folder / name) for name in table)
        raise ValueError(f"{folder} holds several splits: name one of {names}")
    return table


def _load_file(datasets: Any, file: Path, cache_folder: str | None) -> Any:
    if file.suffix not in BUILDERS:
        raise ValueError(f"{file} ends in {file.suffix!r}, which is not one of {', '.join(BUILDERS)}")
    if not file.stat().st_size:
        raise ValueError(f"{file} has no rows: it is empty")
    show = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            BUILDERS[file.suffix], data_files=str(file.resolve()), split="train", cache_dir=cache_folder
        )
    except Exception as error:  # of the reader of one of several formats
        malformed = _malformed_json(file) if BUILDERS[file.suffix] == "json" else None
        raise ValueError(malformed or f"{file} cannot be read: {_innermost(error)}") from error
    finally:
        if show:
            datasets.enable_progress_bars()


def _malformed_json(file: Path) -> str | None:
    """What is wrong with the first line that is no JSON object; None where that is not it."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8: {error}"
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return _json_error(text, f"{file}, line ", first_line=1)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and (found := _json_error(line, f"{file}, line ", first_line=number)):
            return found
    return None


def _json_error(text: str, where: str, *, first_line: int) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        return f"{where}{line}: not JSON ({error.msg} at character {error.colno}): {_shortened(error.doc)}"
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, Mapping) for row in rows):
        return f"{where}{first_line}: not a JSON object of columns: {_shortened(text)}"
    return None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def distinct_names(paths: Sequence[str]) -> dict[str, str]:
    """A short name for each path: that of the file, or the path as given where two files have one name."""
    names = [Path(path).name for path in paths]
    return {path: name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)}
