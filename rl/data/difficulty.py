"""Which training rows are neither too easy nor too hard, by the share of attempts that solved them before."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.atomic_file import replacing


@dataclass(kw_only=True, slots=True)
class DifficultyFilter:
    """Keeps training rows whose pass rate lies between two bounds, both included.

    The rates are a column of the data, or a file that an evaluation wrote; without either the filter cannot
    tell, and is refused.
    """

    column: str | None = None
    """Column of the training files with the pass rate of each row, 0 to 1."""
    file: str | None = None
    """JSON lines with `id` and `pass_rate` of each problem, as an evaluation writes them."""
    min: float = 0.0
    """Lowest pass rate that is kept; above 0 leaves out what was never solved."""
    max: float = 1.0
    """Highest pass rate that is kept; below 1 leaves out what was always solved."""
    unrated: Literal["keep", "drop"] = "keep"
    """What becomes of rows without a rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max <= 1:
            raise ValueError(f"min={self.min}, max={self.max}: must be 0 <= min <= max <= 1")
        if (self.column is None) == (self.file is None):
            raise ValueError(
                f"column={self.column!r}, file={self.file!r}: one of the two must say where pass rates are"
            )


class PassRates:
    """The rates that a filter goes by.

    Raises:
        ValueError: the file of rates is missing, malformed (names its line) or rates a problem twice.
    """

    def __init__(self, settings: DifficultyFilter) -> None:
        self.settings = settings
        self._by_id = None if settings.file is None else read_pass_rates(settings.file)

    def keeps(self, problem_id: str, row: Mapping[str, Any]) -> bool:
        """Raises ValueError for a rate that is none."""
        settings = self.settings
        if settings.column is not None:
            rate = row[settings.column]
        else:
            assert self._by_id is not None
            rate = self._by_id.get(problem_id)
        if rate is None:
            return settings.unrated == "keep"
        return settings.min <= _checked(rate, settings.column or "pass_rate") <= settings.max

    def num_matched(self, problem_ids: set[str]) -> int:
        """How many of these problems the file rates; all of them count where a column has the rates."""
        return len(problem_ids) if self._by_id is None else len(problem_ids & self._by_id.keys())


def read_pass_rates(path: str) -> dict[str, float]:
    """Rates by problem id, from JSON lines of `id` and `pass_rate`; other keys are passed over.

    Raises:
        ValueError: names the file and the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"difficulty.file={path!r} is no local file")
    rates: dict[str, float] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(entry, dict) or not {"id", "pass_rate"} <= entry.keys():
            has = sorted(entry) if isinstance(entry, dict) else repr(entry)
            raise ValueError(f"{where}: needs the keys 'id' and 'pass_rate', has {has}")
        if (key := str(entry["id"])) in rates:
            raise ValueError(f"{where}: problem {key!r} is rated twice")
        try:
            rates[key] = _checked(entry["pass_rate"], "pass_rate")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return rates


def write_pass_rates(path: Path, rates: Mapping[str, float]) -> None:
    """Rates by problem id, as `read_pass_rates` reads them; the file appears whole or not at all."""
    lines = (
        json.dumps({"id": key, "pass_rate": _checked(rate, "pass_rate")}, ensure_ascii=False)
        for key, rate in rates.items()
    )
    with replacing(path) as file:
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _checked(rate: Any, name: str) -> float:
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not number or not math.isfinite(rate) or not 0 <= rate <= 1:
        raise ValueError(f"{name}={rate!r} is not a number from 0 to 1")
    return float(rate)
