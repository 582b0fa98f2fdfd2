"""The order of training problems: shuffled anew in every epoch, without an end, any of them by its number.

Problem number n is a function of the seed and n alone. So a run that continues at number n asks for number n:
there is no state to save and nothing to replay.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from rl.types import Problem


class ProblemsByNumber(ABC):
    """Endless problems, in the order of their numbers."""

    _number = 0

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """The problem of a number from 0 on; it does not matter which were asked for before."""

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        problem = self.problem(self._number)
        self._number += 1
        return problem


class ShuffledProblems(ProblemsByNumber):
    """Endless problems from `num_problems` of them; each epoch has every one once.

    Args:
        problem_at: the problem at a place from 0 to `num_problems` - 1.
        seed: what the order depends on.
        shuffle: off, every epoch is in the order of the places.
    """

    def __init__(
        self, problem_at: Callable[[int], Problem], *, num_problems: int, seed: str, shuffle: bool = True
    ) -> None:
        assert num_problems > 0
        self._problem_at = problem_at
        self._num_problems = num_problems
        self._seed = seed
        self._shuffle = shuffle
        self._epoch: tuple[int, list[int]] | None = None

    def problem(self, number: int) -> Problem:
        epoch, place = divmod(number, self._num_problems)
        return self._problem_at(self._places(epoch)[place] if self._shuffle else place)

    def _places(self, epoch: int) -> list[int]:
        if self._epoch is None or self._epoch[0] != epoch:
            places = list(range(self._num_problems))
            random.Random(f"{self._seed} epoch {epoch}").shuffle(places)
            self._epoch = (epoch, places)
        return self._epoch[1]
