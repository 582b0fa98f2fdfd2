"""The lines of metrics.jsonl, as they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rl.observability.metrics import parse_record
from rl.observability.sinks.place import Place, place_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedRecord:
    """One line of the file."""

    number: int
    """Of the line, from 0. A run that went back gives a record that it writes again the number it had, or,
    where a backend that cannot forget has another record of that number, the next."""
    place: Place
    values: dict[str, float]
    """By metric, without the step."""


class MetricsTail:
    """Reads on where it stopped. A file that is replaced, as a run that goes back does, is read on as it was
    until `restart`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._end = self._number = 0

    def restart(self) -> None:
        """The next record is the first one of the file that is there then."""
        self.close()
        self._end = self._number = 0

    def __iter__(self) -> Iterator[NumberedRecord]:
        """Records that were not read yet; one counts as read when the next is asked for."""
        while (line := self._line()) is not None:
            record = _record(line, self._number)
            if record is not None:
                yield record
            self._end += len(line)
            self._number += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _line(self) -> bytes | None:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return None
        self._file.seek(self._end)
        line = self._file.readline()
        return line if line.endswith(b"\n") else None


def _record(line: bytes, number: int) -> NumberedRecord | None:
    """None of a line that is no record."""
    try:
        values = parse_record(line.decode())
        step = values.pop("step")
        return NumberedRecord(number=number, place=place_of(values, step), values=values)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
