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
    theirs: str
    status: str
    """same, renamed or refused; with the trainer's path before it a name is the same."""
    ours: str
    """Our options, separated by spaces."""
    remark: str

    def options(self) -> list[str]:
        """Return our options as they are written."""
        return [
            f"config.{option[1:]} in a config function"
            if option.startswith("#")
            else f"--{option.lstrip('@')}"
            for option in self.ours.split()
        ]

    def hint(self) -> str:
        """Return what to do instead."""
        ours = " or ".join(self.options())
        if self.status == "refused":
            return f"{self.theirs} is no option here: {self.remark}" + (
                f"; see {ours}" if ours else ""
            )
        return f"{self.theirs} is called {ours} here" + (f" ({self.remark})" if self.remark else "")


@cache
def known_names() -> dict[str, KnownName]:
    """Return the rows by name."""
    text = files(__package__).joinpath("known_names.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return {row["theirs"]: KnownName(**row) for row in rows}


def find(option: str) -> KnownName | None:
    """Return the row of an option that somebody typed, who may have put `trainer.` before it or
    misspelled it.
    """
    names = known_names()
    for name in (option, option.removeprefix(TRAINER)):
        section = name.rpartition(".")[0]
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
            (found,) = close
            # With our path and a name that is the same, what was typed is misspelled and no name of
            # theirs.
            if found.rpartition(".")[0] == section and (
                name == option or names[found].status != "same"
            ):
                return names[found]
    return None
