"""Rows of files: reading, splits by content, the order of training problems, and pass rates.

Files are mapped into memory as Arrow tables, so a file may be larger than memory and any row can be
read directly. Only what is named as a dataset of the hub is downloaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rl.config.tree import check_bounds
from rl.tasks.rows import WrittenRows, get_cell, read_filled_lines, read_written_rows
from rl.types import Problem
from rl.utils.errors import list_causes
from rl.utils.extras import describe_install
from rl.utils.files import replace_file

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
HUB = "hub:"
"""Begin of the name of a dataset on the Hugging Face hub."""
LOOKED_AT = 1000
"""Rows of a file in which columns are looked for by their names."""


# Optional packages


def import_for_tasks(module: str, *, needed_by: str) -> ModuleType:
    """Import a module of the optional group `tasks`.

    A missing package is a ValueError that says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # a dependency of the package is missing
        raise ValueError(
            f"{needed_by} needs the package {package!r}, which is not installed: "
            f"{describe_install('tasks')}"
        ) from error


def decode_settings(settings: Mapping[str, Any], *, name: str = "settings") -> dict[str, Any]:
    """Decode strings that start with `[` or `{` as JSON, for nested settings on the command line.

    Example: {"size": 3, "ranges": "[1, 2]"} becomes {"size": 3, "ranges": [1, 2]}.
    """
    decoded = {}
    for key, value in settings.items():
        decoded[key] = value
        if isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                decoded[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name}.{key}={value!r}: starts like JSON, but is not: {error}"
                ) from error
    return decoded


# Rows


class TypedRows:
    """Rows of a Parquet file or a saved `datasets.Dataset`, with their types."""

    def __init__(self, table: Any, *, fields: Sequence[str] = ()) -> None:
        """`fields` are further columns, in objects of the table's (`get_cell`)."""
        self.table = table
        self._fields = fields
        self._narrow: dict[str, type[np.floating[Any]]] = {}
        """Columns of numbers with fewer digits than a Python float has."""
        for name, feature in table.features.items():
            # Lists and objects have no dtype.
            if getattr(feature, "dtype", "") in ("float16", "float32"):
                self._narrow[name] = np.dtype(feature.dtype).type

    def list_columns(self, needed: Iterable[str] = ()) -> list[str]:
        return list(self.table.column_names)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._convert_narrow(self.table[number])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._convert_narrow, self.table)

    def _convert_narrow(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with 0.1 where a narrow column has 0.1.

        As a Python float, that is 0.10000000149.
        """
        if not self._narrow and not self._fields:
            return values
        wide = dict(values)
        for name in self._fields:
            wide[name] = get_cell(values, name)
        for name, narrow in self._narrow.items():
            if wide.get(name) is not None:
                wide[name] = float(str(narrow(wide[name])))
        return wide

    def place(self, number: int) -> str:
        return f"row {number + 1}"


def read_rows(
    path: str, *, columns: Mapping[str, str], cache_folder: str | None = None
) -> TypedRows | WrittenRows:
    """Read a file, a folder of `Dataset.save_to_disk`, or a dataset of the Hugging Face hub.

    Args:
        path: a local path, or `hub:owner/name:split` (`hub:owner/name:subset:split`), which is
            downloaded into the cache of `datasets`.
        columns: the needed columns, by the setting that names each; with a dot the field of a
            column's objects.
        cache_folder: where Arrow copies of files are kept; None: the default of `datasets`.

    Raises:
        ValueError: the file is missing, unreadable or empty, or a column is missing (lists the
            present ones).
    """
    rows = _open_rows(path, needed=tuple(columns.values()), cache_folder=cache_folder)
    present = rows.list_columns(columns.values())
    for setting, column in columns.items():
        if column not in present and column.partition(".")[0] not in present:
            names = ", ".join(map(repr, present))
            raise ValueError(
                f"{path} has no column {column!r} ({setting}); its columns are {names}"
            )
    if isinstance(rows, WrittenRows):
        return rows
    # Without the other columns, which may be large, such as images.
    fields = [column for column in columns.values() if column not in present]
    needed = {*columns.values()} - {*fields} | {column.partition(".")[0] for column in fields}
    return TypedRows(rows.table.select_columns(sorted(needed)), fields=fields)


def look_at(path: str, wanted: Callable[[str], bool]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the columns of a file's first rows, and those rows with the wanted columns alone.

    Raises as `read_rows`.
    """
    rows = _open_rows(path, needed=(), cache_folder=None)
    if isinstance(rows, WrittenRows):
        first = list(itertools.islice(rows.read_objects(), LOOKED_AT))
        names = list(dict.fromkeys(name for row in first for name in row))
        return names, [{name: row[name] for name in row if wanted(name)} for row in first]
    names = list(rows.table.column_names)
    # Without the other columns, which may be large, such as images.
    table = rows.table.select_columns(list(filter(wanted, names)))
    return names, list(itertools.islice(TypedRows(table), LOOKED_AT))


def _open_rows(
    path: str, *, needed: Sequence[str], cache_folder: str | None
) -> TypedRows | WrittenRows:
    """Return the rows of a file with all of its columns."""
    datasets = import_for_tasks("datasets", needed_by=f"reading {path}")
    is_on_hub = path.startswith(HUB)
    try:
        local = Path(path).expanduser()
    except RuntimeError as error:  # of ~name
        raise ValueError(f"{path}: {error}") from error
    if not is_on_hub:
        _check_local(path, local)

    # Parquet and Arrow say the type of each column; JSON and CSV are read as they are written.
    is_typed = is_on_hub or local.is_dir() or local.suffix == ".parquet"
    try:
        if is_on_hub:
            table = _load_from_hub(path, datasets, cache_folder=cache_folder)
        elif is_typed:
            table = _load_table(local, datasets, cache_folder=cache_folder)
        else:
            folder = Path(cache_folder or datasets.config.HF_DATASETS_CACHE).expanduser()
            written = read_written_rows(local, columns=list(dict.fromkeys(needed)), folder=folder)
    except Exception as error:  # each format's reader has errors of its own
        raise ValueError(f"{path} cannot be read: {_find_innermost(error)}") from error
    if is_typed and isinstance(table, Mapping):
        separator = ":" if is_on_hub else "/"
        names = ", ".join(f"{path}{separator}{name}" for name in table)
        # A choice of relay's own could train on the split that is meant for evaluation.
        raise ValueError(f"{path} holds several splits: name one of {names}")
    rows = TypedRows(table) if is_typed else written
    if not len(rows):
        raise ValueError(f"{path} has no rows")
    return rows


def _check_local(path: str, local: Path) -> None:
    if not local.exists():
        raise ValueError(
            f"{path!r} is not a local file or folder; a dataset of the hub is written "
            f"{HUB}owner/name:split"
        )
    files = sorted(file for file in local.glob("*.*") if file.suffix in SUFFIXES)
    is_saved = any((local / name).exists() for name in ("state.json", "dataset_dict.json"))
    if files and not is_saved:
        raise ValueError(
            f"{path} is a folder of files, not of a `Dataset.save_to_disk`: name its files, such "
            f"as {files[0]}"
        )
    if not (local.is_file() or local.is_dir()):
        raise ValueError(f"{path!r} is neither a file nor a folder")
    if local.is_file() and local.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} ends in {local.suffix!r}, which is not one of {', '.join(SUFFIXES)}"
        )


def _load_from_hub(path: str, datasets: ModuleType, *, cache_folder: str | None) -> Any:
    """Download a dataset of the hub, or take it from the cache; all its splits if none is named."""
    name, *parts = path.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(parts) > 2:
        raise ValueError(f"a dataset of the hub is written {HUB}owner/name:split")
    subset = parts[0] if len(parts) == 2 else None
    split = parts[-1] if parts else None
    with _hide_progress(datasets):
        return datasets.load_dataset(name, subset, split=split, cache_dir=cache_folder)


def _load_table(local: Path, datasets: ModuleType, *, cache_folder: str | None) -> Any:
    """Load a Parquet file or a saved dataset."""
    with _hide_progress(datasets):
        if local.is_dir():
            return datasets.load_from_disk(str(local))
        return datasets.Dataset.from_parquet(str(local.resolve()), cache_dir=cache_folder)


@contextmanager
def _hide_progress(datasets: ModuleType) -> Iterator[None]:
    """Turn off the progress bars of `datasets` during the block."""
    shows_progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


def _find_innermost(error: BaseException) -> str:
    # `datasets` wraps the errors of its readers several times; relay's own say all there is.
    if type(error) is ValueError:
        return str(error)
    *_, error = list_causes(error)
    return f"{type(error).__name__}: {error}"


# Splits, which depend only on the content of a row


def hash_content(text: str) -> int:
    """Return 64 bits that identify a question, ignoring white space."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def is_held_out(key: int, *, share: float) -> bool:
    """Return True if a problem belongs to the held-out share (0 to 1) of all possible problems."""
    return key < share * 2**64


def choose(keys: Sequence[int], most: int | None) -> list[int]:
    """Return the indices of at most `most` rows, in order; the choice depends only on their
    content.

    Keys of a held-out share are all small, so they are hashed again before the comparison.
    """
    places = range(len(keys))
    if most is None or most >= len(keys):
        return list(places)
    return sorted(sorted(places, key=lambda place: (hash_content(str(keys[place])), place))[:most])


# Order


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedProblems:
    """Finitely many problems, before their order is shuffled."""

    num: int
    problem_at: Callable[[int], Problem]
    digest_at: Callable[[int], str]
    """Digest of a problem's content (`rl.tasks.fingerprint`)."""
    order: str
    """Description of the order in which they are trained on."""


class ProblemsByNumber:
    """Endless problems, each a function of its number.

    So a run can continue at any number without a replay.
    """

    def __init__(
        self, problem: Callable[[int], Problem], *, listed: ListedProblems | None = None
    ) -> None:
        """`listed` are the problems that repeat; None for others."""
        self.problem = problem
        self.listed = listed
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        return self.problem(next(self._numbers))


def shuffle_problems(
    problem_at: Callable[[int], Problem],
    *,
    num_problems: int,
    seed: str,
    shuffle: bool = True,
    digest_at: Callable[[int], str] | None = None,
) -> ProblemsByNumber:
    """Return endless problems that repeat `num_problems` of them, each once per epoch.

    Args:
        problem_at: returns the problem at an index from 0 to `num_problems` - 1.
        seed: determines the order.
        shuffle: shuffle each epoch anew; off, every epoch is in the order of the indices.
        digest_at: returns the digest of the problem at an index, by which a resumed run compares
            them.
    """

    # One epoch at a time: the order of a large data set takes memory and time.
    @functools.lru_cache(maxsize=1)
    def places(epoch: int) -> list[int]:
        indices = list(range(num_problems))
        random.Random(f"{seed} epoch {epoch}").shuffle(indices)
        return indices

    def problem(number: int) -> Problem:
        epoch, place = divmod(number, num_problems)
        return problem_at(places(epoch)[place] if shuffle else place)

    if digest_at is None:
        return ProblemsByNumber(problem)
    order = f"shuffled by seed {seed!r}" if shuffle else "in the order of the rows"
    listed = ListedProblems(
        num=num_problems, problem_at=problem_at, digest_at=digest_at, order=order
    )
    return ProblemsByNumber(problem, listed=listed)


# Pass rates


@dataclass(kw_only=True, slots=True)
class DifficultyFilter:
    """Keeps training rows whose pass rate is within bounds, or that have none.

    The pass rate is the share of solved attempts.
    """

    column: str | None = None
    """Column of the training files with the pass rate of each row, 0 to 1."""
    file: str | None = None
    """JSON lines with `id` and `pass_rate` of each problem, as an evaluation writes them."""
    min: float = 0.0
    """Lowest pass rate that is kept; above 0 drops problems that were never solved."""
    max: float = 1.0
    """Highest pass rate that is kept; below 1 drops problems that were always solved."""

    def __post_init__(self) -> None:
        check_bounds(self, "max", at_least=0, at_most=1)
        check_bounds(self, "min", at_least=0, at_most=self.max)
        if (self.column is None) == (self.file is None):
            raise ValueError(
                f"column={self.column!r}, file={self.file!r}: exactly one must say the pass rates"
            )

    def is_within_bounds(self, rate: Any) -> bool:
        """Return True if there is no rate, or if it is within the bounds.

        Raises ValueError for an invalid one.
        """
        return rate is None or self.min <= _check_rate(rate) <= self.max


def read_pass_rates(path: str) -> dict[str, float]:
    """Read rates by problem id from JSON lines of `id` and `pass_rate`.

    A ValueError names the file and the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"difficulty.file={path!r} is not a local file")
    rates: dict[str, float] = {}
    for number, line in _read_lines(file, path):
        try:
            entry = json.loads(line)
            key, rate = str(entry["id"]), _check_rate(entry["pass_rate"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: not an 'id' with a 'pass_rate': {error}"
            ) from error
        if key in rates:
            raise ValueError(f"{path}, line {number}: problem {key!r} is rated twice")
        rates[key] = rate
    return rates


def _read_lines(file: Path, path: str) -> Iterator[tuple[int, str]]:
    try:
        yield from read_filled_lines(file)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error


def write_pass_rates(path: Path, rates: Mapping[str, float]) -> None:
    """Write rates by problem id for `read_pass_rates`; the file appears whole or not at all."""
    text = ""
    for key, rate in rates.items():
        entry = {"id": key, "pass_rate": _check_rate(rate)}
        text += json.dumps(entry, ensure_ascii=False) + "\n"
    with replace_file(path) as file:
        file.write_text(text, encoding="utf-8")


def _check_rate(rate: Any) -> float:
    # A bool is an int in Python, but "true" in a file is a mistake. NaN fails the comparison.
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"the pass rate {rate!r} is not a number from 0 to 1")
    return float(rate)
