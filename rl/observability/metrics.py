"""Metrics: values that know how they are reduced, and the file they end in.

`metrics.jsonl` has one JSON object a line: a step's (`step`, `policy_version`, `reward/mean`,
`loss/mean`, `time/step_s`, ...) or an evaluation's (it has the key `eval/correct`). The lines are
strictly valid JSON: a number that JSON lacks is the string "nan", "inf" or "-inf", so a divergence
is told from a missing value; `read_metrics` turns it back.

Names end in their unit (`_s`, `_per_s`), logprobs are in nats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, SupportsFloat, TypeVar, runtime_checkable

from rl.errors import writing
from rl.observability.background import WRITE_S
from rl.observability.whole_lines import WholeLines
from rl.worker_thread import run_aside

MetricT = TypeVar("MetricT", bound="Metric")


@runtime_checkable
class Metric(Protocol):
    """A value from one rank, call or step, to be merged with others of its kind."""

    @property
    def value(self) -> float:
        """The reduced value; NaN where there was nothing to reduce."""
        ...

    def merge(self: MetricT, other: MetricT) -> MetricT:
        """Of both together; associative. `other` is the later one."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean, kept as a sum and a count so that parts of any size merge exactly."""

    sum: float
    count: float = 1

    @property
    def value(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Std:
    """Standard deviation of all values (not Bessel-corrected), each part kept as its mean, its count and
    its squared deviations; merged as Chan, Golub and LeVeque (1983) do."""

    mean: float
    count: float = 1
    squares: float = 0.0

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
    """Largest; NaN if any part is NaN, so that a divergence cannot hide behind a larger number."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(math.nan if math.isnan(other.value) else max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The latest: a version, a learning rate."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several ranks, calls or steps as one set, each by its own reduction.

    Raises:
        TypeError: one name has two kinds of reduction.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif type(merged[name]) is type(metric):
                merged[name] = merged[name].merge(metric)
            else:
                raise TypeError(
                    f"{name} is reduced as {type(merged[name]).__name__} and {type(metric).__name__}"
                )
    return merged


Record = Mapping[str, Metric | SupportsFloat | None]
"""One line's values by name; a plain number (of numpy too) is taken as it is, None is left out."""


def reduced(metric: Metric | SupportsFloat | None) -> float | None:
    """The number of one entry of a record; None where there is nothing to report (a mean over nothing)."""
    if metric is None or (isinstance(metric, Mean) and not metric.count):
        return None
    value = metric.value if isinstance(metric, Metric) else metric
    return value if isinstance(value, int) else float(value)


class MetricsWriter:
    """Appends records to a file, each line whole or not at all; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises UnwrittenError where the file cannot be made."""
        self._num_records = len(read_metrics(path)) if path.exists() else 0
        self._file = WholeLines(path)
        with writing(path):
            self._file.open()

    @property
    def num_records(self) -> int:
        """Lines of the file, those of an earlier writer included."""
        return self._num_records

    async def flush_to_disk(self) -> None:
        """Return when what is written would outlive a power failure; raises UnwrittenError, also after
        `WRITE_S`."""
        with writing(self._file.path):
            await run_aside(self._file.sync, name="fsync", limit_s=WRITE_S)

    def write(self, record: Record) -> None:
        """Append one line; what there is nothing to report of is left out.

        Raises:
            UnwrittenError: the disk is full, or the file cannot be written; nothing of the line is in it.
        """
        line: dict[str, float | str] = {}
        for name, metric in record.items():
            if (value := reduced(metric)) is not None:
                line[name] = value if math.isfinite(value) else str(value)
        with writing(self._file.path):
            self._file.append(json.dumps(line, allow_nan=False) + "\n")
        self._num_records += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file; one that was cut short by the end of its process is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [parse_record(line) for line in lines if line.endswith("\n")]


def parse_record(line: str) -> dict[str, float]:
    """One line of a metrics file; raises ValueError where it is not JSON."""
    return {k: float(v) if isinstance(v, str) else v for k, v in json.loads(line).items()}
