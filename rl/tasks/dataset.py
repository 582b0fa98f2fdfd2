"""Problems from rows of local files: which ones are trained on, which are held out, in which order.

    class Capitals(DatasetTask):
        def rubric(self, *, seed: int) -> Rubric: ...

A task of rows overrides `rubric`, and `convert` where a row needs more than its columns renamed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.config.configurable import Configurable
from rl.data.difficulty import DifficultyFilter
from rl.data.order import ShuffledProblems
from rl.data.rows import distinct_names
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.replies import answer_part
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.problem_rows import Columns, ProblemRows, RowReader, drop_by_difficulty
from rl.types import Problem, Rollout

logger = logging.getLogger(__name__)

HELD_OUT = "held_out"
"""Name of the evaluation set that is split from the training files."""


class DatasetTask(Configurable):
    """Single-turn problems from JSON lines, JSON, Parquet or CSV files, or folders saved by `datasets`.

    Raises:
        ValueError: when built: a file is missing or malformed, a column is not there, a row has no question,
            an id stands twice, nothing is left to train on; it names the file and the row, or the setting.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        train_files: tuple[str, ...] = ()
        """Local files, or folders of `datasets.Dataset.save_to_disk`."""
        eval_files: dict[str, str] = field(default_factory=dict)
        """A file for each evaluation set, by the set's name; the first is that of the run's curve. Without
        any, and with `held_out` 0, there is nothing to evaluate on: a run then needs loop.eval_every 0."""
        held_out: float = 0.0
        """Share of the training files that is held out as evaluation set `held_out`, by what the rows ask."""
        num_eval: int | None = None
        """Most problems of an evaluation set, the same for every seed; None takes all."""
        max_problems: int | None = None
        """Most training problems, the same for every seed; None takes all."""
        shuffle: bool = True
        """A new order by the run's seed in every epoch; off, that of the files."""
        columns: Columns = field(default_factory=Columns)
        difficulty: DifficultyFilter | None = None
        """Leaves out training rows that are too easy or too hard."""
        system: str = ""
        """System message of problems that have none in a column."""
        template: str = "{question}"
        """What the model is asked; `{question}` stands for the row's question."""
        cache_folder: str | None = None
        """Where `datasets` keeps Arrow copies of the files; None: its own default."""

        def __post_init__(self) -> None:
            if not 0 <= self.held_out < 1:
                raise ValueError(f"held_out={self.held_out}: must be at least 0 and below 1")
            for name, value in (("num_eval", self.num_eval), ("max_problems", self.max_problems)):
                if value is not None and value < 1:
                    raise ValueError(f"{name}={value}: must be at least 1, or None for all")
            if "{question}" not in self.template:
                raise ValueError(f"template={self.template!r}: must contain {{question}}")
            if self.held_out and HELD_OUT in self.eval_files:
                raise ValueError(f"eval_files has a set {HELD_OUT!r}: that is the name of the held-out share")

    def __init__(self, *, config: Config) -> None:
        self.config = config
        if not config.train_files:
            raise ValueError("train_files is empty: name at least one local file")
        for name, file in config.eval_files.items():
            if file in config.train_files:
                raise ValueError(
                    f"eval_files.{name}={file!r} is one of train_files: nothing is left to train on"
                )
        paths = dict.fromkeys([*config.train_files, *config.eval_files.values()])
        reader = RowReader(
            names=distinct_names(list(paths)),
            columns=config.columns,
            difficulty=config.difficulty,
            cache_folder=config.cache_folder,
            convert=self._converted,
            usable=self.usable,
        )
        train = reader.read(config.train_files)
        evals = {
            name: reader.read([file], also=f"eval_files.{name}") for name, file in config.eval_files.items()
        }
        self._train, evals = self._split(train, evals)
        self._evals = {name: [rows.problem(i) for i in range(len(rows))] for name, rows in evals.items()}

    def convert(self, problem: Problem, row: Mapping[str, Any]) -> Problem:
        """What a row becomes, whenever it is its turn.

        Args:
            problem: question, answer and the rest as the columns have them, in the template.
            row: its columns.

        Raises:
            ValueError: the row is unusable; file and row are put before the message, and nothing starts.
        """
        return problem

    def usable(self, problem: Problem) -> bool:
        """Asked once, when the row is read; False leaves it out, which is counted. Raises as `convert`."""
        return True

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless, each epoch in an order of its own; `.problem(n)` is number n without those before it."""
        return self._ordered(self._train, f"train {seed}")

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Those of the training problems that have a demonstration, in another order.

        Raises:
            ValueError: none has.
        """
        shown = self._train.with_demonstration()
        if not len(shown):
            column = self.config.columns.demonstration
            raise ValueError(
                f"no training row has a demonstration: columns.demonstration={column!r} must name the "
                "column of full replies, or the run do without warm-up (--warmup None)"
            )
        return self._ordered(shown, f"warm-up {seed}")

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return self._evals

    def environment(self, problem: Problem) -> Environment:
        return SingleTurn(problem=problem, system=problem.info.get("system", ""))

    def rubric(self, *, seed: int) -> Rubric:
        """1 for a reply that is the answer, thoughts before it and spaces at its ends aside."""
        return Rubric(criteria=(Criterion(name="answer", function=is_answer),), correct=is_correct)

    def _converted(self, problem: Problem, row: Mapping[str, Any]) -> Problem:
        """As the model is asked it."""
        config = self.config
        info = dict(problem.info)
        if config.system and "system" not in info:
            info["system"] = config.system
        question = config.template.replace("{question}", problem.question)
        return self.convert(dataclasses.replace(problem, question=question, info=info), row)

    def _ordered(self, rows: ProblemRows, seed: str) -> Iterator[Problem]:
        return ShuffledProblems(rows.problem, num_problems=len(rows), seed=seed, shuffle=self.config.shuffle)

    def _split(
        self, train: ProblemRows, evals: dict[str, ProblemRows]
    ) -> tuple[ProblemRows, dict[str, ProblemRows]]:
        """Training rows that no evaluation set has, too easy and too hard ones left out; and those sets."""
        config, num_read = self.config, len(train)
        if config.held_out:
            held, train = train.divided(share=config.held_out)
            if not len(held):
                raise ValueError(
                    f"held_out={config.held_out} holds out none of {num_read} rows: raise it, or name "
                    "eval_files"
                )
            evals = {**evals, HELD_OUT: held}
        evaluated = {key for rows in evals.values() for key in rows.keys}
        filters = {"are in an evaluation set": num_read - len(train := train.without(evaluated))}
        if config.difficulty is not None:
            num_before = len(train)
            filters["fail the difficulty filter"] = num_before - len(
                train := drop_by_difficulty(train, config.difficulty)
            )
        dropped = ", ".join(f"{count} {why}" for why, count in filters.items() if count)
        if not len(train):
            raise ValueError(f"no training row is left of {num_read}: {dropped}")
        train = train.chosen(config.max_problems)
        evals = {name: rows.chosen(config.num_eval) for name, rows in evals.items()}
        sizes = ", ".join(f"{name} {len(rows)}" for name, rows in evals.items())
        logger.info(
            "%d training problems of %d rows (%s); to evaluate: %s",
            len(train), num_read, dropped or "none left out", sizes,
        )  # fmt: skip
        return train, evals


def is_correct(rollout: Rollout) -> bool:
    return answer_part(rollout.text) == rollout.prompt.problem.answer.strip()


def is_answer(rollout: Rollout) -> float:
    return float(is_correct(rollout))
