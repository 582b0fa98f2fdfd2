"""Where in a run a record belongs, and which of them somebody outside was given already."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl.atomic_file import replacing


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Records of a run are in the order of their places, and no two have the same."""

    step: int
    is_evaluation: bool = False
    """Which comes after the step's own record."""


def place_of(record: Iterable[str], step: float) -> Place:
    """Of a record with these keys."""
    return Place(int(step), any(name.startswith("eval/") for name in record))


@dataclass(slots=True)
class Sent:
    """What a sink was given, kept in a file beside the run's logs: for the process that goes on with it."""

    file: Path
    last: Place | None = None
    """The last record; None: it was given nothing."""
    is_cut: bool = False
    """Whether the run has gone back since, so that some of it is no more."""
    kept: Place | None = None
    """The last record that it was given and that still is; None: none is."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Under which the sink knows the run."""
    next_number: int = 0
    """Above those of all records that it has."""

    @classmethod
    def read(cls, file: Path) -> Sent:
        """As an earlier process left it; that of a new run where there is none, or it is no such file."""
        try:
            said = json.loads(file.read_text())
            return cls(
                file,
                last=_place(said["last"]),
                is_cut=bool(said["is_cut"]),
                kept=_place(said["kept"]),
                run_id=str(said["run_id"]),
                next_number=int(said["next_number"]),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(file)

    def save(self, last: Place | None) -> None:
        """It was given this record, and all that it has is of the run; raises OSError."""
        self.last = self.kept = last
        self.is_cut = False
        self._write()

    def cut(self, keep: Place | None) -> None:
        """The run has gone back to this record, None to its beginning; raises OSError."""
        if self.kept is not None and (keep is None or keep < self.kept):
            self.kept, self.is_cut = keep, True
            self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        told = {name: value for name, value in asdict(self).items() if name != "file"}
        with replacing(self.file) as file:
            file.write_text(json.dumps(told) + "\n")


def _place(said: Any) -> Place | None:
    return None if said is None else Place(**said)
