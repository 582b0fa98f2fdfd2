"""Metrics: values with their reduction, and the file metrics.jsonl.

The file has one JSON object a line: a step's (`step`, `policy_version`, `reward/mean`,
`time/step_s`, ...) or an evaluation's (it has the key `eval/correct`). Lines are strictly valid
JSON: numbers that are not finite are the strings "nan", "inf" and "-inf". Names end in their unit
(`_s`, `_per_s`), logprobs are in nats.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

import numpy as np

from rl.utils.errors import writing
from rl.utils.files import AppendFile, json_lines
from rl.utils.threads import WRITE_S, run_aside

MetricT = TypeVar("MetricT", bound="Metric")


@runtime_checkable
class Metric(Protocol):
    """Value of one rank, call or step, which merges with others of its kind."""

    @property
    def value(self) -> float:
        """Reduced value; NaN if there was nothing to reduce."""
        ...

    def merge(self: MetricT, other: MetricT) -> MetricT:
        """Return the reduction of both; associative. `other` is the later one."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean, stored as sum and count so that parts of any size merge exactly."""

    sum: float
    count: float = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of single values, exactly as if they were merged in this order."""
        return cls(functools.reduce(operator.add, values), len(values)) if values else cls(0.0, 0)

    @property
    def value(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Std:
    """Standard deviation without Bessel's correction, stored as mean, count and squared deviations.

    Parts are merged as in Chan, Golub and LeVeque (1983).
    """

    mean: float
    count: float = 1
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Std:
        """Return the deviation of single values, exactly as if they were merged in this order."""
        mean, squares = (values[0], 0.0) if values else (0.0, 0.0)
        for count, value in enumerate(values[1:], start=1):
            apart = value - mean
            mean += apart / (count + 1)
            squares += apart * apart * count / (count + 1)
        return cls(mean=mean, count=len(values), squares=squares)

    @property
    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def merge(self, other: Std) -> Std:
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return Std(
            mean=self.mean + apart * other.count / count,
            count=count,
            squares=self.squares + other.squares + apart * apart * self.count * other.count / count,
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """Total over ranks, calls and steps."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """Maximum; NaN if any part is NaN, so that a divergence stays visible."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(math.nan if math.isnan(other.value) else max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """Latest value, such as a version or a learning rate."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several ranks, calls or steps, each by its own reduction."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            earlier = merged.get(name, metric)
            assert type(earlier) is type(metric), f"{name} is reduced as {earlier} and {metric}"
            merged[name] = earlier.merge(metric) if name in merged else metric
    return merged


Record = Mapping[str, Metric | SupportsFloat | None]
"""Values of one line by name; plain numbers (also of numpy) are written as they are, None is
omitted.
"""


def reduced(metric: Metric | SupportsFloat | None) -> float | None:
    """Return the number of one entry of a record, or None for a mean over nothing."""
    if metric is None or (isinstance(metric, Mean) and not metric.count):
        return None
    value = metric.value if isinstance(metric, Metric) else metric
    return value if isinstance(value, int) else float(value)


class Sink(Protocol):
    """A destination of metrics: metrics.jsonl, the console, TensorBoard."""

    def write(self, record: Record) -> None:
        """Write the record of a step, or of an evaluation, which has the key `eval/correct`."""
        ...


class MetricsWriter:
    """Writer of metrics.jsonl; each line is written whole or not at all. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises UnwrittenError."""
        self.num_records = len(read_metrics(path))
        """Number of lines of the file, including those of an earlier writer."""
        self._file = AppendFile(path)
        with writing(path):
            self._file.open()

    async def flush_to_disk(self) -> None:
        """Wait until the lines are on the disk; raises UnwrittenError, also after `WRITE_S`."""
        with writing(self._file.path):
            await run_aside(self._file.sync, name="fsync", limit_s=WRITE_S)

    def write(self, record: Record) -> None:
        """Append one line, without empty metrics; after an UnwrittenError the file is unchanged."""
        line = {
            name: value for name, metric in record.items() if (value := reduced(metric)) is not None
        }
        with writing(self._file.path):
            self._file.append(to_json(line) + "\n")
        self.num_records += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_json(value: Any) -> str:
    """Return strictly valid JSON: numbers that are not finite and objects of other types become
    strings.
    """
    return json.dumps(_plain(value), allow_nan=False)


_AS_THEY_ARE = frozenset({int, str, bool, type(None)})


def _plain(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE or (type(value) is float and math.isfinite(value)):
        return value  # most values are numbers of a list
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | bool | int) else str(value)


RENAMED = {
    "age/max": "staleness/max",
    "age/mean": "staleness/mean",
    "canary/logprob_diff": "parity/logprob_diff",
    "time/canary_s": "time/parity_s",
}
"""Present names of metrics by the names that older runs wrote. A run that is resumed has both in
its file, so old names are replaced where a line is read.
"""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the records of a metrics file without damaged lines; none if the file does not exist.

    A line without a step is damaged; other values that are not numbers are left out.
    """
    records = (read_record(line) for _, line in json_lines(path) if line is not None)
    return [record for record in records if record is not None]


def read_record(line: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the values of a line that are numbers; None for a line whose step is not a number.

    Metrics of older runs have their present names (`RENAMED`).
    """
    record = {}
    for name, value in line.items():
        number = parse_number(value)
        if number is not None:
            record[RENAMED.get(name, name)] = number

    return record if math.isfinite(record.get("step", math.nan)) else None


def parse_number(value: object) -> float | None:
    """Return a number of a line, in which numbers that are not finite are strings; None for
    anything else.
    """
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return None
