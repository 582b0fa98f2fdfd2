"""Options of torchtitan and TorchForge by their names there, for the error of someone who types
what they know.

`known_names.tsv` has a row for each: its name, whether it is the same, renamed or refused here, our
options and a remark. Of our options `#path` is a field that only a config function sets, `@name` an
option outside the config.
"""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TRAINER = "trainer."


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownName:
    """An option of another trainer, and what stands for it here."""

    theirs: str
    status: str
    """same, renamed or refused; with the trainer's path before it a name is the same."""
    ours: str
    """Our options, separated by spaces."""
    remark: str

    def write_options(self) -> list[str]:
        """Return our options as they are written."""
        return list(map(_write_option, self.ours.split()))

    def describe(self) -> str:
        """Return what to do instead."""
        ours = " or ".join(self.write_options())
        if self.status == "refused":
            return f"{self.theirs} is no option here: {self.remark}" + (
                f"; see {ours}" if ours else ""
            )
        return f"{self.theirs} is called {ours} here" + (f" ({self.remark})" if self.remark else "")


def _write_option(option: str) -> str:
    if option.startswith("#"):
        return f"config.{option[1:]} in a config function"
    return f"--{option.lstrip('@')}"


@cache
def read_known_names() -> dict[str, KnownName]:
    """Return the rows by name."""
    text = files(__package__).joinpath("known_names.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return {row["theirs"]: KnownName(**row) for row in rows}


def find(option: str) -> KnownName | None:
    """Return the row of an option that somebody typed, who may have put `trainer.` before it or
    misspelled it.
    """
    names = read_known_names()
    for name in (option, option.removeprefix(TRAINER)):
        section = name.rpartition(".")[0]
        for close in difflib.get_close_matches(name, names, n=1, cutoff=0.85):
            # With our path and a name that is the same, what was typed is misspelled and no name of
            # theirs.
            is_misspelled = name != option and names[close].status == "same"
            if close.rpartition(".")[0] == section and not is_misspelled:
                return names[close]
    return None
