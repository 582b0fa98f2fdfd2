"""Where in a run a record belongs, and which of them somebody outside was given already."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

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
    """The last record."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Under which the sink knows the run."""

    @classmethod
    def read(cls, file: Path) -> Sent:
        """As an earlier process left it; that of a new run where there is none, or it is no such file."""
        try:
            said = json.loads(file.read_text())
            last = None if said["last"] is None else Place(**said["last"])
            return cls(file, last=last, run_id=str(said["run_id"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(file)

    def save(self, last: Place | None) -> None:
        """Raises OSError."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        told = {"last": None if last is None else asdict(last), "run_id": self.run_id}
        with replacing(self.file) as file:
            file.write_text(json.dumps(told) + "\n")
        self.last = last
