"""Problems from rows of local files: which are trained on, which are held out, and in which order.

A task with data of its own overrides `rubric`, and `convert` if a row needs more than renamed
columns. Rows are read and checked once, and turned into problems whenever one is asked for; only
row numbers and hashes of the questions stay in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.reward_functions import MESSAGES
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.cells import (
    to_context,
    to_demonstration,
    to_id,
    to_messages,
    to_rate,
    to_system,
    to_text,
)
from rl.tasks.data import (
    DifficultyFilter,
    TypedRows,
    choose,
    hash_content,
    is_held_out,
    read_pass_rates,
    read_rows,
    shuffle_problems,
)
from rl.tasks.fingerprint import hash_problem
from rl.tasks.rows import WrittenRows, to_plain
from rl.tasks.task import complete_answer, get_sendable_state
from rl.types import Message, Problem, Rollout
from rl.utils.numbers import same_answer

logger = logging.getLogger(__name__)

MAX_SHOWN = 8
"""Most further columns that a line names."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Usual names of columns that a model of texts cannot read."""
HELD_OUT = "held_out"
"""Name of the evaluation set that is split from the training files."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """A row of a file."""

    path: str
    file: str
    """Name of the file in ids."""
    rows: TypedRows | WrittenRows
    """All rows of the file."""
    number: int
    """Row in the file, from 0."""
    key: int = 0
    """Hash of the question."""
    digest: str = ""
    """Hash of everything that the problem is made of."""

    def __str__(self) -> str:
        return f"{self.path}, {self.rows.place(self.number)}"

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Put the row before the message of a ValueError."""
        try:
            yield
        except ValueError as error:  # text that is not UTF-8 is one too
            raise ValueError(f"{self}: {error}") from error


@dataclass(kw_only=True, slots=True)
class Columns:
    """Names of the columns."""

    question: str = "question"
    """Text, or a list of messages (`{"role": "user", "content": "..."}`) that ends with the
    user's."""
    context: str | None = None
    """Text that follows the question in the prompt, after an empty line; cells may be empty."""
    answer: str | None = "answer"
    """Reference answer; None if the rubric needs none."""
    id: str | None = None
    """Id, unique in all files. None: the file's name and the row's number."""
    demonstration: str | None = None
    """Full reply for the warm-up; a list of strings for several turns."""
    system: str | None = None
    """System message before the question."""
    info: tuple[str, ...] = ()
    """Further columns for `Problem.info`, for reward functions and environments."""

    def list_by_setting(self) -> dict[str, str]:
        """Return every named column by the setting that names it."""
        columns = {}
        for entry in fields(self):
            column = getattr(self, entry.name)
            if entry.name != "info" and column is not None:
                columns[f"columns.{entry.name}"] = column
        for i, column in enumerate(self.info):
            columns[f"columns.info.{i}"] = column
        return columns

    def list_text_columns(self) -> list[str]:
        """Return the columns whose values are texts."""
        named = (self.question, self.context, self.answer, self.id, self.demonstration, self.system)
        return [column for column in named if column is not None]


class DatasetTask(Configurable):
    """Single-turn problems from rows of local files.

    Files are JSON lines, JSON, Parquet or CSV, or folders saved by `datasets`.

    Raises:
        ValueError: a file is missing or malformed, a column is missing, a row has no question, an
            id is not unique, or nothing is left to train on; names the file and the row, or the
            setting.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Files, their columns, and the rows that are trained on and evaluated on."""

        train_files: tuple[str, ...] = ()
        """Local files, or folders of `datasets.Dataset.save_to_disk`."""
        eval_files: dict[str, str] = field(default_factory=dict)
        """A file for each evaluation set, by the set's name; the first is that of the run's curve.
        Without any, and with `held_out` 0, there is nothing to evaluate on: a run then needs
        loop.eval_every 0.
        """
        held_out: float = 0.0
        """Share of the training files that is held out as evaluation set `held_out`, by content."""
        num_eval: int | None = None
        """Most problems of an evaluation set, the same for every seed; None takes all."""
        max_problems: int | None = None
        """Most training problems, the same for every seed; None takes all."""
        shuffle: bool = True
        """Shuffle each epoch anew by the run's seed; off, use the order of the files."""
        columns: Columns = field(default_factory=Columns)
        difficulty: DifficultyFilter | None = None
        """Filter that drops training rows that are too easy or too hard."""
        system: str = ""
        """System message of problems without one in a column."""
        template: str = "{question}"
        """Text of the prompt, in which `{question}` stands for the row's question."""
        cache_folder: str | None = None
        """Folder for Arrow copies of the files; None: the default of `datasets`."""

        def __post_init__(self) -> None:
            check_bounds(self, "held_out", at_least=0, below=1)
            check_bounds(self, "num_eval", "max_problems", at_least=1)
            if "system" in self.columns.info and self.columns.system != "system":
                raise ValueError(
                    "columns.info has a column 'system', under which problem.info keeps the system "
                    "message: rename the column, or set columns.system='system'"
                )
            if "{question}" not in self.template:
                raise ValueError(f"template={self.template!r}: must contain {{question}}")
            if self.held_out and HELD_OUT in self.eval_files:
                raise ValueError(
                    f"eval_files has a set {HELD_OUT!r}: that is the name of the held-out share"
                )

    __getstate__ = get_sendable_state

    def __init__(self, *, config: Config) -> None:
        self.config = config
        if not config.train_files:
            raise ValueError("train_files is empty: name at least one local file")
        for name, file in config.eval_files.items():
            if file in config.train_files:
                raise ValueError(f"eval_files.{name}={file!r} is one of train_files")
        # Ids are unique over all files: rates and the problems of a resumed run are found by them.
        by_id: dict[str, Row] = {}
        train = self._read(config.train_files, by_id, setting="train_files")
        evals = {}
        for name, file in config.eval_files.items():
            evals[name] = self._read([file], by_id, setting=f"eval_files.{name}")
        self._train, evals = self._split(train, evals)
        self._evals: dict[str, list[Problem]] = {}
        for name, rows in evals.items():
            self._evals[name] = [self._make_problem(row) for row in rows]

    @property
    def summary(self) -> str:
        """Numbers of problems, and which columns are read as what, in one line."""
        columns, sizes = self.config.columns, [f"{len(self._train):,} to train on"]
        sizes += [f"{len(problems):,} {name}" for name, problems in self._evals.items()]
        named = columns.list_by_setting().items()
        read = [f"{key[8:]} = {column!r}" for key, column in named if ".info." not in key]
        others = [repr(name) for name in columns.info if name not in columns.list_text_columns()]
        if others:
            more = f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
            read.append(f"for rewards: {', '.join(others[:MAX_SHOWN])}{more}")
        if media := [repr(name) for name in columns.info if name.strip().lower() in MEDIA]:
            read.append(f"the model reads texts alone, not {', '.join(media)}")
        return f"{', '.join(sizes)}; {', '.join(read)}"

    def convert(self, problem: Problem, row: Mapping[str, Any]) -> Problem:
        """Return the final problem of a row, from the columns' problem and the named columns;
        called at each use.

        Numbers in the columns of texts are texts, as they are written in JSON and CSV files; those
        in `columns.info` are numbers. A ValueError stops the run at the start, and names file and
        row.
        """
        return problem

    def usable(self, problem: Problem) -> bool:
        """Return False to drop a problem, which is counted; called once, when the row is read."""
        return True

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems, each epoch in a new order; `.problem(n)` is number n."""
        return self._order(self._train, f"train {seed}")

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return the training problems with a demonstration, in another order.

        Raises ValueError if there are none.
        """
        column = self.config.columns.demonstration
        demonstrated = []
        if column is not None:
            # By the problem, not by the cell: `convert` may add a demonstration, or drop it.
            for row in self._train:
                if self._make_problem(row).demonstration:
                    demonstrated.append(row)
        if not demonstrated:
            raise ValueError(
                f"no training row has a demonstration: columns.demonstration={column!r} must name "
                "the column of full replies; or run without warm-up (--warmup None)"
            )
        return self._order(demonstrated, f"warm-up {seed}")

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return self._evals

    def environment(self, problem: Problem) -> Environment:
        messages = tuple(Message(**message) for message in problem.info.get(MESSAGES, ()))
        return SingleTurn(problem=problem, system=problem.info.get("system", ""), messages=messages)

    def rubric(self, *, seed: int) -> Rubric:
        """Give 1 for a reply that equals the answer, as a text or as a number.

        Thoughts and outer spaces are ignored.
        """
        return Rubric(criteria=(Criterion(name="answer", function=is_correct),), correct=is_correct)

    def _order(self, rows: Sequence[Row], seed: str) -> Iterator[Problem]:
        # By number: rows become problems when they are asked for, and only then take memory.
        return shuffle_problems(
            lambda i: self._make_problem(rows[i]),
            num_problems=len(rows),
            seed=seed,
            shuffle=self.config.shuffle,
            digest_at=lambda i: rows[i].digest,
        )

    def _read(self, paths: Sequence[str], by_id: dict[str, Row], *, setting: str) -> list[Row]:
        """Return every usable row of the files, and add all rows to `by_id`.

        A ValueError names the file and the row, or the column.
        """
        config, usable_rows, num_rows = self.config, list[Row](), 0
        # Files of one name in several folders have their whole paths in ids, others the name alone.
        all_paths = dict.fromkeys((*config.train_files, *config.eval_files.values()))
        names = [Path(path).name for path in all_paths]
        needed = config.columns.list_by_setting()
        if (
            config.difficulty is not None
            and config.difficulty.column is not None
            and setting == "train_files"
        ):
            needed["difficulty.column"] = config.difficulty.column
        for path in paths:
            # Every row is read and converted once, so that a bad row stops the run at its start.
            file = Path(path).name if names.count(Path(path).name) == 1 else path
            rows = read_rows(path, columns=needed, cache_folder=config.cache_folder)
            num_rows += len(rows)
            for number, values in enumerate(rows):
                row = Row(path=path, file=file, rows=rows, number=number)
                problem = self._make_problem(row, values)
                earlier = by_id.setdefault(problem.id, row)
                if earlier is not row:
                    raise ValueError(
                        f"{row}: id {problem.id!r} also occurs in {earlier}; ids must be unique"
                    )
                with row.name_errors():
                    if self.usable(problem):
                        usable_rows.append(self._hash_row(row, problem, values))
        if not usable_rows:
            raise ValueError(
                f"{setting}: none of the {num_rows} rows of {', '.join(paths)} can be used"
            )
        num_unusable = num_rows - len(usable_rows)
        if num_unusable:
            logger.warning("%s: %d of %d rows cannot be used", setting, num_unusable, num_rows)
        return usable_rows

    def _hash_row(self, row: Row, problem: Problem, values: Mapping[str, Any]) -> Row:
        """Return the row with the hashes of its question and of its content."""
        columns = self.config.columns
        # The question without the template, so that a changed template keeps the split.
        question = values.get(columns.question)
        infos = [values.get(column) for column in columns.info]
        if isinstance(question, list):
            messages = to_messages(question, columns.question)
            question = "\n".join(f"{message.role}: {message.content}" for message in messages)
            infos.append(question)
        question = to_text(question, columns.question)
        # Rows with one instruction and different inputs ask different questions.
        question += self._read_context(values)
        digest = hash_problem(problem, problem.info.get("system"), infos)
        return replace(row, key=hash_content(question), digest=digest)

    def _make_problem(self, row: Row, values: Mapping[str, Any] | None = None) -> Problem:
        """Return the problem of a row, whose values are read if not given.

        A ValueError names file and row.
        """
        config, columns = self.config, self.config.columns
        with row.name_errors():
            values = row.rows[row.number] if values is None else values
            # A column may serve as text and as info, in which its numbers are numbers.
            texts = {name: values.get(name) for name in columns.list_text_columns()}
            info = {name: to_plain(values.get(name)) for name in columns.info}
            named = {**info, **texts}

            question, messages = self._read_question(texts[columns.question], values)
            if messages:
                info[MESSAGES] = [asdict(message) for message in messages]
            system = ""
            if columns.system is not None:
                system = to_system(texts[columns.system], columns.system)
                if system and messages and messages[0].role == "system":
                    raise ValueError(
                        f"columns {columns.system!r} and {columns.question!r} both have a system "
                        "message: set columns.system to None"
                    )
            # The row's own system message comes before that of the config.
            if system or (config.system and (not messages or messages[0].role != "system")):
                info["system"] = system or config.system

            problem_id, answer = f"{row.file}:{row.number + 1}", ""
            demonstration: str | tuple[str, ...] = ""
            if columns.id is not None:
                problem_id = to_id(texts[columns.id], columns.id)
            if columns.answer is not None:
                answer = self._read_answer(texts[columns.answer], columns.answer)
            if columns.demonstration is not None:
                shown = texts[columns.demonstration]
                demonstration = to_demonstration(shown, columns.demonstration)
            problem = Problem(
                id=problem_id,
                question=question,
                answer=answer,
                demonstration=demonstration,
                info=info,
            )
            return self.convert(problem, named)

    def _read_question(
        self, value: Any, values: Mapping[str, Any]
    ) -> tuple[str, tuple[Message, ...]]:
        """Return the last message to the model, in the template, and all messages of a list."""
        config, column = self.config, self.config.columns.question
        messages = to_messages(value, column) if isinstance(value, list) else ()
        text = messages[-1].content if messages else to_text(value, column)
        # Not `format`: other braces in a template, as of LaTeX, stay as they are.
        question = config.template.replace("{question}", text + self._read_context(values))
        if messages:
            messages = (*messages[:-1], replace(messages[-1], content=question))
        return question, messages

    def _read_answer(self, value: Any, column: str) -> str:
        try:
            return to_text(value, column)
        except ValueError as error:
            raise ValueError(
                f"{error}: if no reward needs the reference answer, set columns.answer to None"
            ) from error

    def _read_context(self, values: Mapping[str, Any]) -> str:
        """Return what follows the question, after an empty line."""
        column = self.config.columns.context
        text = "" if column is None else to_context(values.get(column), column)
        return text and f"\n\n{text}"

    def _split(
        self, train: list[Row], evals: dict[str, list[Row]]
    ) -> tuple[list[Row], dict[str, list[Row]]]:
        """Return training rows that no evaluation set contains, and the evaluation sets."""
        config, num_read = self.config, len(train)
        if config.held_out:
            held_out = [row for row in train if is_held_out(row.key, share=config.held_out)]
            if not held_out:
                # Of a few rows the share may be less than one.
                least = min(row.key for row in train)
                held_out = [row for row in train if row.key == least]
            evals = {**evals, HELD_OUT: held_out}

        # By the question: also a row of another file that asks what an evaluation set asks.
        evaluated: set[int] = set()
        for rows in evals.values():
            evaluated.update(row.key for row in rows)
        train = [row for row in train if row.key not in evaluated]
        dropped = f"{num_read - len(train)} are in an evaluation set"
        if config.difficulty is not None:
            num_before, train = len(train), self._filter_by_difficulty(train, config.difficulty)
            dropped += f", {num_before - len(train)} fail the difficulty filter"
        if not train:
            way = ""
            if config.held_out:
                way = (
                    f"; held_out={config.held_out} holds out a share of the questions: give rows "
                    "to evaluate as eval_files (relay.grpo: eval_data), or set held_out=0 and "
                    "loop.eval_every=0"
                )
            raise ValueError(f"no training row is left of {num_read}: {dropped}{way}")

        # After the split: a row beyond `num_eval` is not trained on either.
        train = _choose(train, config.max_problems)
        chosen: dict[str, list[Row]] = {}
        sizes = []
        for name, rows in evals.items():
            chosen[name] = _choose(rows, config.num_eval)
            sizes.append(f"{name} {len(chosen[name])}")
        logger.info(
            "%d training problems of %d rows (%s); to evaluate: %s",
            len(train),
            num_read,
            dropped,
            ", ".join(sizes),
        )
        return train, chosen

    def _filter_by_difficulty(self, rows: list[Row], settings: DifficultyFilter) -> list[Row]:
        """Return the rows that pass the filter.

        Raises ValueError if the file of rates has none of these problems.
        """
        by_id = None if settings.file is None else read_pass_rates(settings.file)
        rows_within, num_rated = list[Row](), 0
        for row in rows:
            with row.name_errors():
                if by_id is None:
                    rate = to_rate(row.rows[row.number].get(settings.column or ""))
                else:
                    rate = by_id.get(self._make_problem(row).id)
                num_rated += rate is not None
                if settings.is_within_bounds(rate):
                    rows_within.append(row)
        # Rates of other data would let every row pass, without a word.
        if rows and by_id is not None and not num_rated:
            example = self._make_problem(rows[0]).id
            raise ValueError(
                f"difficulty.file={settings.file!r} rates none of the training problems, such as "
                f"{example!r}"
            )
        return rows_within


def is_correct(rollout: Rollout) -> bool:
    """Return True for the answer's text, or for its number written in another way.

    Not for a reply that was cut off.
    """
    # A number that was cut off could have gone on: 12 of 123 is no answer.
    answer = complete_answer(rollout.last_turn)
    return answer is not None and same_answer(rollout.prompt.problem.answer, answer)


def _choose(rows: list[Row], most: int | None) -> list[Row]:
    """Return at most `most` rows, the same for every seed."""
    keys = [row.key for row in rows]
    return [rows[i] for i in choose(keys, most)]
