"""Branches of an episode: conversations that share leading turns, and the rows to train them in.

An agent's episode is a forest of turns: history is rewritten, a sub-agent starts another
conversation, a reply is sampled again. A branch is a path of turns from a first request to a last
reply. Each trained branch with a turn that no earlier trained branch has is a row of tokens, which
trains those turns and reads the others. A linear episode has one branch and one row.

Example (turn 2 answers a rewritten history, turn 3 is a second reply to the prompt of turn 1):
    branches   main (0, 1), main (2,), superseded (0, 3)
    rows       turns (0, 1) train (0, 1), turns (2,) train (2,)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from rl.utils.printing import describe_value

BranchRole = Literal["main", "sub-agent", "auxiliary", "superseded"]
"""auxiliary: a title, a summary; superseded: a reply that the agent did not go on with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One conversation of an episode, as a path of its turns.

    Raises ValueError for an unknown role.
    """

    turns: tuple[int, ...]
    """Indices of `Rollout.turns`, from the first request to the last reply. Branches may share
    leading turns."""
    role: BranchRole = "main"
    cause: str = ""
    """Reason why this is a branch of its own: "fork", "again", "rewritten", "system", "tools" or
    "agent"; empty for the first."""
    is_trained: bool = True

    def __post_init__(self) -> None:
        if type(self.turns) is not tuple:
            object.__setattr__(self, "turns", tuple(self.turns))
        if self.role not in get_args(BranchRole):
            raise ValueError(
                f"branch: role={describe_value(self.role)} is unknown: must be one of "
                f"{', '.join(get_args(BranchRole))}"
            )

    @property
    def is_plain(self) -> bool:
        """True for a branch as a linear episode has it: main, without a cause, trained."""
        return self.role == "main" and not self.cause and self.is_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchRow:
    """A trained branch as one sequence of tokens."""

    turns: tuple[int, ...]
    """Indices of the branch's turns."""
    is_new: tuple[bool, ...]
    """True for each turn that this row trains; earlier rows train the others."""


@cache
def make_one_branch(num_turns: int) -> tuple[Branch, ...]:
    """Return the branch of a linear episode, always the same object for a number of turns."""
    return (Branch(turns=tuple(range(num_turns))),)


def is_default(branches: Sequence[Branch]) -> bool:
    """Return True for the very branches that `make_one_branch` gives."""
    first = branches[0]
    return isinstance(first, Branch) and branches is make_one_branch(len(first.turns))


def check_branches(branches: Sequence[Branch], *, num_turns: int) -> None:
    """Raise ValueError unless the branches are paths of one forest that has every turn."""
    predecessors: dict[int, int | None] = {}
    for number, branch in enumerate(branches):
        where = f"branches[{number}]"
        if not isinstance(branch, Branch):
            raise ValueError(f"{where}={describe_value(branch)} must be a Branch")
        turns = branch.turns
        if not turns:
            raise ValueError(f"{where} has turns=(): must have at least one turn")
        last: int | None = None
        for turn in turns:
            if not isinstance(turn, int) or not 0 <= turn < num_turns:
                raise ValueError(
                    f"{where} has turns={describe_value(turns)}: {describe_value(turn)} must be a "
                    f"turn's index from 0 to {num_turns - 1}"
                )
            if last is not None and turn <= last:
                raise ValueError(
                    f"{where} has turns={describe_value(turns)}: must be in the order in which "
                    "they were asked, each once"
                )
            # A turn's prompt_ids are what follows its predecessor, so there is only one.
            if predecessors.setdefault(turn, last) != last:
                raise ValueError(
                    f"{where} has turns={describe_value(turns)}: turn {turn} "
                    f"{_describe_place(last)}, in an earlier branch it "
                    f"{_describe_place(predecessors[turn])}; must be the same in all branches"
                )
            last = turn
    missing = sorted(set(range(num_turns)) - set(predecessors))
    if missing:
        raise ValueError(
            f"branches lack the turns {missing} of {num_turns}: every turn must be in a branch"
        )


def _describe_place(predecessor: int | None) -> str:
    return "comes first" if predecessor is None else f"follows turn {predecessor}"


def find_main_branch(branches: Sequence[Branch]) -> Branch:
    """Return the main branch whose last turn was asked last; without one, the last branch."""
    mains = [branch for branch in branches if branch.role == "main"]
    # Of branches that end with the same turn, the first.
    return max(mains, key=lambda branch: branch.turns[-1]) if mains else branches[-1]


def find_predecessors(branches: Sequence[Branch]) -> dict[int, int | None]:
    """Return the turn before each turn in its conversation; None for a conversation's first."""
    predecessors: dict[int, int | None] = {}
    for branch in branches:
        last: int | None = None
        for turn in branch.turns:
            predecessors[turn] = last
            last = turn
    return predecessors


def split_rows(branches: Sequence[Branch]) -> list[BranchRow]:
    """Return the rows that train each turn of a trained branch once.

    The first trained branch that has a turn trains it.
    """
    rows: list[BranchRow] = []
    seen: set[int] = set()
    for branch in branches:
        if not branch.is_trained:
            continue
        is_new = tuple(turn not in seen for turn in branch.turns)
        if any(is_new):
            rows.append(BranchRow(turns=branch.turns, is_new=is_new))
            seen.update(branch.turns)
    return rows
