"""Options of other trainers by their names there, for the error of someone who types what they
know: torchtitan, TorchForge, TRL, verl, OpenRLHF and the Tinker cookbook.

`known_names.tsv` has a row for each: whose it is, its name, whether it is the same, renamed or
refused here, our options and a remark. Of our options `#path` is a field that only a config
function sets, `@name` an option outside the config or a short name.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TRAINER = "trainer."
PREFIXES = (
    TRAINER, "args.", "training_args.", "trainer.args.", "grpo_config.", "config.", "cli_config.",
)  # fmt: skip
"""Names of the objects that hold these options in scripts, as far as people type them: `trainer.`
before a name of torchtitan's, the others before a field of TRL's `GRPOConfig` or a recipe's."""
MIN_SIMILARITY = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownName:
    """An option of another trainer, and what stands for it here."""

    source: str
    theirs: str
    status: str
    """same, renamed or refused; with the trainer's path before it a name is the same."""
    ours: str
    """Our options, separated by spaces."""
    remark: str

    def write_options(self) -> list[str]:
        """Return our options as they are written."""
        return list(map(_write_option, self.ours.split()))

    def fits(self, sections: Container[str]) -> bool:
        """Return whether our options are those of a config with these fields at its root."""
        paths = [option for option in self.ours.split() if option[0] not in "#@"]
        return not paths or any(path.partition(".")[0] in sections for path in paths)

    def describe(self) -> str:
        """Return what to do instead, without the name."""
        ours = " or ".join(self.write_options())
        if self.status == "refused":
            return f"is no option here: {self.remark}{f'; see {ours}' if ours else ''}"
        return f"is called {ours} here{f' ({self.remark})' if self.remark else ''}"


def _write_option(option: str) -> str:
    if option.startswith("#"):
        return f"config.{option[1:]} in a config function"
    return f"--{option.lstrip('@')}"


@cache
def read_known_names() -> dict[str, tuple[KnownName, ...]]:
    """Return the rows by name, which several trainers may have."""
    text = files(__package__).joinpath("known_names.tsv").read_text(encoding="utf-8")
    names: dict[str, tuple[KnownName, ...]] = {}
    for row in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
        names[row["theirs"]] = (*names.get(row["theirs"], ()), KnownName(**row))
    return names


def describe_all(rows: Sequence[KnownName]) -> str:
    """Return what to do instead of a name: for each trainer that has it, if they differ.

    Example:
        "TRL's max_steps is called --loop.num_steps here (optimizer steps there)"
    """
    sources: dict[str, list[str]] = {}
    for row in rows:
        article = "the " if " " in row.source else ""
        sources.setdefault(row.describe(), []).append(f"{article}{row.source}'s")
    answers = []
    for answer, owners in sources.items():
        *first, last = owners
        names = f"{', '.join(first)} and {last}" if first else last
        answers.append(f"{names} {rows[0].theirs} {answer}")
    return "; ".join(answers)


def find_exact(option: str) -> tuple[KnownName, ...]:
    """Return the rows of an option that somebody typed, with or without the objects that hold it:
    `args.beta` is `beta`, `actor.optim.lr` and `adv_estimator` are ends of verl's names.
    """
    names = read_known_names()
    for name in (option, *(option.removeprefix(prefix) for prefix in PREFIXES)):
        if name in names:
            return names[name]
    longer = [name for name in names if name.endswith(f".{option}")]
    return names[longer[0]] if len(longer) == 1 else ()


def find_similar(option: str) -> tuple[KnownName, ...]:
    """Return the rows of the name that an option may be a misspelling of."""
    names = read_known_names()
    for name in (option, option.removeprefix(TRAINER)):
        section = name.rpartition(".")[0]
        for close in difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY):
            # With our path and a name that is the same, what was typed is misspelled and no name of
            # theirs.
            is_misspelled = name != option and names[close][0].status == "same"
            if close.rpartition(".")[0] == section and not is_misspelled:
                return names[close]
    # `epochs` is the end of their `num_epochs`.
    ends = [known for known in names if known.rpartition("_")[2] == option]
    return names[ends[0]] if ends else ()


def list_sources() -> Iterator[tuple[str, list[KnownName]]]:
    """Yield the trainers with their rows, in the order of the file."""
    rows_by_source: dict[str, list[KnownName]] = {}
    for rows in read_known_names().values():
        for row in rows:
            rows_by_source.setdefault(row.source, []).append(row)
    yield from rows_by_source.items()
