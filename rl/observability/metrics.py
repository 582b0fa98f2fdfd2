"""Metrics: values with their reduction, the file metrics.jsonl, and the learning curve.

The file has one JSON object a line: a step's (`step`, `policy_version`, `reward/mean`,
`time/step_s`, ...) or an evaluation's (it has the key `eval/correct`). Lines are strictly valid
JSON: numbers that are not finite are the strings "nan", "inf" and "-inf". Names end in their unit
(`_s`, `_per_s`), logprobs are in nats.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

import numpy as np

from rl.types import LoopPosition
from rl.utils.errors import raise_unwritten, warn_unwritten
from rl.utils.files import AppendFile, get_previous_file, read_json_lines, replace_file
from rl.utils.threads import WRITE_S, run_in_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MetricT = TypeVar("MetricT", bound="Metric")

OLD_SUFFIX = ".old"
"""Suffix of the earlier records of a run that started again from the beginning."""
REWARD, CORRECT, EVALUATION = "#8a94a6", "#2f6fbb", "#d1495b"
"""Colours of the learning curve."""

logger = logging.getLogger(__name__)


# Values


@runtime_checkable
class Metric(Protocol):
    """Value of one rank, call or step, which merges with others of its kind.

    Example:
        >>> Mean(6.0, count=3).merge(Mean(2.0, count=1)).value
        2.0
    """

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
        # The same operations as in `merge`, so that both give the same bits.
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
        # Of a number and NaN, Python's `max` returns the first.
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


def reduce_metric(metric: Metric | SupportsFloat | None) -> float | None:
    """Return the number of one entry of a record, or None for a mean over nothing."""
    if metric is None or (isinstance(metric, Mean) and not metric.count):
        return None
    value = metric.value if isinstance(metric, Metric) else metric
    # Integers stay integers: a step is written as 3, not as 3.0.
    return value if isinstance(value, int) else float(value)


def reduce_record(record: Record) -> dict[str, float]:
    """Return the numbers of a record, without empty metrics."""
    numbers = {}
    for name, metric in record.items():
        number = reduce_metric(metric)
        if number is not None:
            numbers[name] = number
    return numbers


# The file


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
        with raise_unwritten(path):
            self._file.open()

    async def flush_to_disk(self) -> None:
        """Wait until the lines are on the disk; raises UnwrittenError, also after `WRITE_S`."""
        with raise_unwritten(self._file.path):
            await run_in_thread(self._file.sync, name="fsync", limit_s=WRITE_S)

    def write(self, record: Record) -> None:
        """Append one line, without empty metrics; after an UnwrittenError the file is unchanged."""
        with raise_unwritten(self._file.path):
            self._file.append(to_json(reduce_record(record)) + "\n")
        self.num_records += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_json(value: Any) -> str:
    """Return strictly valid JSON.

    Numbers that are not finite and objects of other types become strings.
    """
    return json.dumps(_convert_to_plain(value), allow_nan=False)


_PLAIN = frozenset({int, str, bool, type(None)})


def _convert_to_plain(value: Any) -> Any:
    # Most values are numbers of a list, a token each: they take the shortest way.
    if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _convert_to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_plain(inner) for inner in value]
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
    records = []
    for _, line in read_json_lines(path):
        record = None if line is None else read_record(line)
        if record is not None:
            records.append(record)
    return records


def read_record(line: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the values of a line that are numbers; None for a line whose step is not a number.

    Metrics of older runs have their present names (`RENAMED`).
    """
    # The file may come from anybody, or from an older version.
    record = {}
    for name, value in line.items():
        number = parse_number(value)
        if number is not None:
            record[RENAMED.get(name, name)] = number

    return record if math.isfinite(record.get("step", math.nan)) else None


def parse_number(value: object) -> float | None:
    """Return the number that a value of a line stands for; None if it is no number."""
    # Numbers that are not finite are strings there.
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return None


# Records of a run that continues


def cut_back(*, metrics: Path, rollouts: Path, position: LoopPosition | None) -> None:
    """Truncate a run's records to the checkpoint that the run continues from.

    Lines of later steps are removed, since those steps are repeated; so are evaluations that the
    checkpoint does not include, an unfinished last line, and lines that are not JSON. A file is
    replaced by one rename, or unchanged. A run that starts from the beginning keeps its earlier
    files under another name.

    Args:
        position: position of the checkpoint; None if the run starts from the beginning.

    Raises:
        UnwrittenError: the disk has no room for the kept lines; the file is unchanged.
    """
    num_kept = _cut(metrics, position)
    for file in (get_previous_file(rollouts), rollouts):
        _cut(file, position)
    if position is not None and num_kept < position.num_records:
        logger.warning(
            "%s has %d lines up to step %d, but %d were written: some are lost",
            metrics, num_kept, position.step, position.num_records,
        )  # fmt: skip


def _cut(file: Path, position: LoopPosition | None) -> int:
    """Remove the lines after the checkpoint from a file; return the number of kept lines.

    A file without any is removed or, without a checkpoint, renamed.
    """
    if not file.exists():
        return 0
    if position is None:
        old = file.with_name(f"{file.name}{OLD_SUFFIX}")
        logger.warning(
            "the run starts from the beginning: its earlier %s is now %s", file.name, old.name
        )
        with raise_unwritten(file):
            file.replace(old)
        return 0
    with file.open("rb") as content:
        lines = content.readlines()
    remaining = [line for line in lines if _is_kept(line, position)]
    num_removed = len(lines) - len(remaining)

    with raise_unwritten(file):
        if num_removed:
            logger.info("%s: removed %d lines of steps that are repeated", file.name, num_removed)
        if not remaining:
            file.unlink()
        elif num_removed:
            with replace_file(file) as new, new.open("wb") as shorter:
                shorter.writelines(remaining)
                shorter.flush()
                # On the disk before the rename, or a power cut could leave an empty file.
                os.fsync(shorter.fileno())
    return len(remaining)


def _is_kept(line: bytes, position: LoopPosition) -> bool:
    """Return whether a line of metrics or rollouts belongs to the checkpoint."""
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
        step, kind = int(record["step"]), str(record.get("kind", ""))
    except (ValueError, KeyError, TypeError):
        logger.warning("removed a damaged line: %.80r", line)
        return False
    is_evaluation = kind.startswith("eval") or any(name.startswith("eval/") for name in record)
    if step > position.step:
        return False
    return step < position.step or position.evaluated or not is_evaluation


# The picture


def draw_learning_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw reward and correctness over steps; a full disk is a warning."""
    figure = make_learning_curve(read_metrics(metrics_path))
    with warn_unwritten(png_path), replace_file(png_path) as file:
        figure.savefig(file, format="png")


def make_learning_curve(records: Sequence[Mapping[str, float]]) -> Figure:
    """Return the figure of reward and correctness over steps."""
    # pyplot would share its global state with a notebook.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label, color in (
        ("reward/mean", "reward, mean of the step", REWARD),
        ("reward/correct", "correct, share of the step's samples", CORRECT),
    ):
        steps, values = _select_points(records, name)
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
        axes.plot(steps, _compute_means(values), color=color, linewidth=1.8, label=label)

    # A few points, with chance of a few percent each: not smoothed.
    steps, values = _select_points(records, "eval/correct")
    if steps:
        label = f"correct, held-out problems (greedy), last {values[-1]:.2f}"
        axes.plot(
            steps, values, color=EVALUATION, linewidth=1.4, marker="o", markersize=5, label=label
        )

    axes.set_ylabel("reward, share correct")
    axes.set_xlabel("step")
    axes.grid(True, color="#e6e8ec", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=9)
    return figure


def _select_points(
    records: Sequence[Mapping[str, float]], name: str
) -> tuple[list[float], list[float]]:
    steps, values = [], []
    for record in records:
        value = record.get(name, math.nan)
        if math.isfinite(value):
            steps.append(record["step"])
            values.append(value)
    return steps, values


def _compute_means(values: Sequence[float]) -> list[float]:
    """Return running means over a window of up to a twentieth of the run."""
    width = max(1, len(values) // 20)
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(statistics.fmean(window))
    return means
