"""A user's own task: rows of files, and what a reply earns by functions of the user's own."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rl.rollouts.reward_functions import MESSAGES, make_criterion
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.tasks.cells import to_text
from rl.tasks.data import LOOKED_AT, read_columns, read_rows
from rl.tasks.dataset import Columns, DatasetTask
from rl.tasks.task import Place, required_answer
from rl.types import Rollout
from rl.utils.numbers import same_answer

QUESTIONS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
"""Usual names of the column with the question, the first that is there counts: rows for TRL have a
`prompt`, often made of a `question` that is kept beside it."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
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
        for reward in config.reward:
            if reward in PLACES and config.columns.answer is None:
                raise ValueError(
                    f"reward={reward!r} compares with the reference answer, but columns.answer is "
                    "None: name the column of the answers"
                )
        super().__init__(config=config)

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


def find_columns(files: Sequence[str]) -> Columns:
    """Return the columns of files by their usual names; reward functions get all but `system`.

    Only columns of all files count. Where none has a usual name for the question, the default
    stays, which the task then misses. A column whose values are no texts or numbers, or not in each
    row, is no reference answer, but reward functions get it. Raises as `read_columns`.
    """
    names = read_columns(files[0], looked_at=LOOKED_AT)
    for file in files[1:]:
        further = read_columns(file, looked_at=LOOKED_AT)
        names = [name for name in names if name in further]
    question = next((name for name in QUESTIONS if name in names), "question")
    answer = next((name for name in ANSWERS if name in names and name != question), None)
    if answer is not None and not all(_has_texts(file, answer) for file in files):
        answer = None
    system = "system" if "system" in names else None
    # Functions in TRL's form ask for the question by its column too.
    info = tuple(name for name in names if name != system)
    return Columns(question=question, answer=answer, system=system, info=info)


def _has_texts(file: str, column: str) -> bool:
    """Return whether the first rows of a file have texts or numbers in a column."""
    rows = read_rows(file, columns={"columns.answer": column})
    try:
        for row in islice(rows, LOOKED_AT):
            to_text(row.get(column), column)
    except ValueError:
        return False
    return True


def choose_template(columns: Columns) -> str:
    """Return the text of a prompt: rows for Alpaca have an `input` beside their instruction."""
    if columns.question == "instruction" and "input" in columns.info:
        return "{question}\n\n{input}"
    return "{question}"
