"""Training problems with their numbers, and where a loop stands in them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Protocol, runtime_checkable

from rl.types import LoopPosition, Problem


@runtime_checkable
class RandomAccess(Protocol):
    """Problems of which any can be had by its number, without those before it."""

    def problem(self, number: int) -> Problem: ...


class NumberedProblems:
    """Gives each problem with its place in the task's order, counted from 0.

    Continued from a position, it first gives those that were outstanding there, then the next ones. Problems
    of random access are asked for just these; others are drawn again from the first on.
    """

    def __init__(self, problems: Iterator[Problem], position: LoopPosition | None = None) -> None:
        self.num_drawn = 0 if position is None else position.num_problems
        """Of the task, outstanding ones included."""
        self._again = set() if position is None else set(position.outstanding)
        """Of the earlier position, not given yet."""
        self._numbered: Iterator[tuple[int, Problem]]
        if isinstance(problems, RandomAccess):
            numbers = itertools.chain(sorted(self._again), itertools.count(self.num_drawn))
            self._numbered = ((number, problems.problem(number)) for number in numbers)
        else:
            self._numbered = self._unseen(enumerate(problems))

    def __iter__(self) -> Iterator[tuple[int, Problem]]:
        return self

    def __next__(self) -> tuple[int, Problem]:
        number, problem = next(self._numbered)
        self._again.discard(number)
        self.num_drawn = max(self.num_drawn, number + 1)
        return number, problem

    def position(self, step: int, *, outstanding: Collection[int]) -> LoopPosition:
        """After `step`, with these numbers drawn and not used, and those outstanding before that have not
        been given again yet."""
        left = tuple(sorted(self._again.union(outstanding)))
        return LoopPosition(step=step, num_problems=self.num_drawn, outstanding=left)

    def _unseen(self, numbered: Iterator[tuple[int, Problem]]) -> Iterator[tuple[int, Problem]]:
        num_seen, again = self.num_drawn, set(self._again)
        return ((number, p) for number, p in numbered if number >= num_seen or number in again)
