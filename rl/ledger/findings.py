"""What the check of a ledger knows so far, and what it finds.

A rule (`rl.ledger.rules`) yields what does not hold in a step, as `Found`; the check names its
place, as a `Violation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.ledger.files import LedgerFile
from rl.ledger.step import LedgerStep, Place

WHOLE_STEP = Place()


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """Something that a ledger does not prove, or disproves."""

    step: int
    rule: str
    """Name of the rule, such as "receipt"."""
    where: str
    """Place in words; empty for the whole step."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f", {self.where}" if self.where else ""
        return (
            f"step {self.step}{where}: {self.what}: expected {self.expected}, found {self.found} "
            f"({self.rule})"
        )


@dataclass(kw_only=True, slots=True)
class Checked:
    """What was checked of a ledger so far."""

    num_steps: int = 0
    num_episodes: int = 0
    num_tokens: int = 0
    """Trained tokens."""
    notes: list[str] = field(default_factory=list)
    """What the ledger does not prove."""
    violations: list[Violation] = field(default_factory=list)
    """Files that are missing or damaged, and the first step that does not hold, if there is one."""
    is_ended: bool = False
    """True if a step does not hold, which ends the check."""
    previous: LedgerFile | None = None
    run: Path = field(default_factory=Path)
    """Folder of the run."""
    first: int = 0
    """Step of the first file."""
    beginning: str = ""
    """Reason why the first file is of a later step than 1."""
    told_first: int = 0
    """Step of the first file when the last one was written."""
    version: int | None = None
    """Policy version after the last step."""
    made: dict[int, int] = field(default_factory=dict)
    """The step that each policy version is from."""
    requests: set[int] = field(default_factory=set)
    """Hashes of the requests that were trained."""
    highest: int = -1
    """Highest number of a problem so far, or seq id of a Tinker client's calls."""
    known_above: int = -1
    """Numbers above it were in no step that the ledger does not have."""
    unknown_until: int = 0
    """Step up to which problems may have been in steps that the ledger does not have."""
    missing: dict[int, int] = field(default_factory=dict)
    """Lower numbers that no step has had, and the step that has passed over each."""
    kind: str = ""
    """That of the ledger's steps (`LedgerStep.kind`)."""
    counts: Counter[str] = field(default_factory=Counter)
    """Facts of a Tinker session that are no violations."""
    origins: list[str] = field(default_factory=list)
    """Ledgers that a Tinker session goes on from."""
    first_other: str = ""
    """Place of the first token of a Tinker session with other logprobs than were sampled."""

    @property
    def violation(self) -> Violation | None:
        """The first violation, if there is one."""
        return self.violations[0] if self.violations else None

    def forget_before(self) -> None:
        """Forget what the next step would follow from: the step before is not known."""
        self.version = None
        self.highest = -1
        self.missing.clear()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A finding of a rule in a step."""

    rule: str
    place: Place
    what: str
    expected: Any
    found: Any


Rule = Callable[[LedgerStep, Checked], Iterator[Found]]
