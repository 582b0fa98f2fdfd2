"""One-line faults of table.tsv, and the tests that should catch each (`python -m
tools.mutants`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAST = "not medium and not slow and not browser and not rehearsal"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: a fragment of a file, which occurs once, and what replaces it."""

    file: str
    original: str
    faulty: str
    tests: tuple[str, ...]
    """Test files, or folders of them, of which one should fail."""
    marker: str = FAST

    @property
    def texts(self) -> tuple[str, ...]:
        return self.file, self.original, self.faulty, *self.tests


def find_stale(root: Path) -> list[str]:
    """Return what is wrong with rows that no longer fit the tree, a line for each."""
    stale = []
    for mutant in MUTANTS:
        file = root / mutant.file
        num = file.read_text().count(mutant.original) if file.is_file() else 0
        if num != 1:
            stale.append(f"{mutant.file}: {mutant.original!r} occurs {num} times: must occur once")
        stale += [
            f"{mutant.file}: there is no {test}"
            for test in mutant.tests
            if not (root / test).exists()
        ]
    return stale


def read_table(file: Path) -> tuple[Mutant, ...]:
    """Return the faults of a table: file, original, faulty, tests and tier, separated by tabs; \\n
    is a line's end.
    """
    _, *lines = file.read_text().splitlines()
    mutants = []
    for line in lines:
        name, original, faulty, tests, tier = line.split("\t")
        mutants.append(
            Mutant(
                file=name,
                original=original.replace("\\n", "\n"),
                faulty=faulty.replace("\\n", "\n"),
                tests=tuple(tests.split()),
                marker=FAST if tier == "fast" else tier,
            )
        )
    return tuple(mutants)


MUTANTS = read_table(Path(__file__).with_suffix(".tsv"))
