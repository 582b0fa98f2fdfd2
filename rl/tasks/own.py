"""A user's own task: rows of files, and what a reply earns by functions of the user's own."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rollouts.reward_functions import MESSAGES, make_criterion
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.tasks.cells import to_context, to_text
from rl.tasks.data import look_at
from rl.tasks.dataset import Columns, DatasetTask
from rl.tasks.rows import get_cell
from rl.tasks.task import Place, required_answer
from rl.types import Rollout
from rl.utils.numbers import same_answer

QUESTIONS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
"""Usual names of the column with the question, the first that is there counts: rows for TRL have a
`prompt`, often made of a `question` that is kept beside it."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
INPUT = "input"
OF_VERL = "reward_model.ground_truth"
"""The answer in rows for verl: a field of the objects of a column."""
PLACES: tuple[str, ...] = typing.get_args(Place)


class OwnTask(DatasetTask):
    """Questions from files, and reward functions by their place.

    Example:
        OwnTask.Config(train_files=("qa.jsonl",), reward=("my_reward:is_right",))
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DatasetTask.Config):
        """Files with their columns, and the reward functions."""

        reward: tuple[str, ...] = ()
        """Reward functions: `module:function`, `file.py:function`, or instead of a function the
        place in a reply where the reference answer must stand: boxed, hashes, tags, last_line,
        last_number or whole."""
        reward_weights: tuple[float, ...] = ()
        """Weight of each reward function; empty: 1 for each."""

        def __post_init__(self) -> None:
            # Not super(), which does not work in a dataclass with slots.
            DatasetTask.Config.__post_init__(self)
            num, num_weights = len(self.reward), len(self.reward_weights)
            if num_weights not in (0, num):
                raise ValueError(
                    f"reward_weights={self.reward_weights}: must have one weight for each of the "
                    f"{num} reward functions"
                )

    config: Config

    def __init__(self, *, config: Config) -> None:
        if not config.reward:
            raise ValueError(
                "reward is empty: name what a reply earns, as module:function, file.py:function, "
                f"or one of {', '.join(PLACES)}"
            )
        # First, as a file without the question's column says which columns there are.
        super().__init__(config=config)
        for reward in config.reward:
            if reward in PLACES and config.columns.answer is None:
                names = ", ".join(map(repr, config.columns.info)) or "none"
                raise ValueError(
                    f"reward={reward!r} compares with the reference answer, but columns.answer is "
                    f"None: name the column of the answers (further columns are {names})"
                )

    def rubric(self, *, seed: int) -> Rubric:
        """Add up the reward functions, each with its weight."""
        config = self.config
        weights = config.reward_weights or (1.0,) * len(config.reward)
        example = next(self.train_problems(seed=seed))
        columns = {name: value for name, value in example.info.items() if name != MESSAGES}
        criteria = list[Criterion | GroupCriterion]()
        for place, weight in zip(config.reward, weights, strict=True):
            if place in PLACES:
                answer = AnswerAt(place=typing.cast(Place, place))
                criteria.append(Criterion(name=place, function=answer, weight=weight))
            else:
                criteria.append(make_criterion(place, weight=weight, columns=columns))
        return Rubric(criteria=tuple(_number_names(criteria)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerAt:
    """Reward function: 1 if the reply has the reference answer in its place, as text or number."""

    place: Place

    def __call__(self, rollout: Rollout) -> float:
        answer = required_answer(rollout, self.place)
        return float(same_answer(rollout.prompt.problem.answer, answer))


def _number_names(
    criteria: Sequence[Criterion | GroupCriterion],
) -> list[Criterion | GroupCriterion]:
    """Return the criteria with a number after each name that occurs several times."""
    counts: dict[str, int] = {}
    numbered = []
    for criterion in criteria:
        name = criterion.name
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            criterion = dataclasses.replace(criterion, name=f"{name}_{counts[name]}")
        numbered.append(criterion)
    return numbered


def find_columns(files: Sequence[str], *, question: str | None = None) -> Columns:
    """Return the columns of files by their usual names; reward functions get all but `system`.

    Only columns of all files count. A column in which no row has a text or a number, such as one of
    lists, is no reference answer, but reward functions get it. Where no column has a usual name for
    the question, the default stays, which the task then misses. Raises as `look_at`.

    Args:
        question: the column of the question, if it is known.
    """
    wanted = {*ANSWERS, INPUT, OF_VERL.partition(".")[0]}
    looks = [look_at(file, lambda name: _fold(name) in wanted) for file in files]
    names = [name for name in looks[0][0] if name.strip()]
    for others, _ in looks[1:]:
        names = [name for name in names if name in others]
    rows = [row for _, first in looks for row in first]

    system = next((name for name in names if _fold(name) == "system"), None)
    question = question or next(_find_usual(QUESTIONS, names), "question")
    answers = [*(name for name in _find_usual(ANSWERS, names) if name != question), OF_VERL]
    answer = next((name for name in answers if any(_has_text(row, name) for row in rows)), None)
    context = None
    # Rows for Alpaca.
    if _fold(question) == "instruction":
        inputs = [name for name in names if _fold(name) == INPUT]
        context = next((name for name in inputs if _are_contexts(rows, name)), None)
    # Functions in TRL's form ask for the question by its column too.
    info = tuple(name for name in names if name != system)
    return Columns(question=question, context=context, answer=answer, system=system, info=info)


def list_columns(file: str) -> list[str]:
    """Return the columns of a file's first rows; raises as `look_at`."""
    return look_at(file, lambda _: False)[0]


def _fold(name: str) -> str:
    """Return a name as it is compared: spreadsheets have `Question`, or spaces around names."""
    return name.strip().lower()


def _find_usual(usual: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the columns with usual names, in the order of those."""
    for wanted in usual:
        yield from (name for name in names if _fold(name) == wanted)


def _has_text(row: Mapping[str, Any], column: str) -> bool:
    try:
        to_text(get_cell(row, column), column)
    except ValueError:
        return False
    return True


def _are_contexts(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """Return whether all rows have a text or a number, or nothing, in a column."""
    try:
        for row in rows:
            to_context(row.get(column), column)
    except ValueError:
        return False
    return True
