"""Mathematics with verifiable answers, graded by math-verify, to which `0.5`, `1/2` and
`\\frac{2}{4}` are equal.

GSM8K's answer column ends in `#### 72`; MATH's solution column has `\\boxed{\\frac{1}{2}}` in it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import threading
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl.config.tree import check_bounds
from rl.rollouts.rubric import Criterion, Rubric, UnparsedAnswer
from rl.tasks.data import import_for_tasks
from rl.tasks.dataset import DatasetTask
from rl.tasks.task import Place, Solved, find_answer, required_answer
from rl.types import Problem, Rollout
from rl.utils.numbers import convert_digits, find_numbers, parse_value
from rl.utils.printing import truncate

GOLD_TIMEOUT_S = 5
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
"""Word of an answer, but no LaTeX command."""
_POWERS = {"\u00b2": "^{2}", "\u00b3": "^{3}"}
_SYMBOL = re.compile("[\u00b2\u00b3\u00bc-\u00be\u2150-\u215e]")
"""Powers and fractions of one character, which math-verify would leave out."""
BOXED = "{question}\n\nThink step by step, then give the final answer as \\boxed{answer}."


class MathProblems(DatasetTask):
    """Word problems and competition mathematics from rows of files."""

    @dataclass(kw_only=True, slots=True)
    class Config(DatasetTask.Config):
        """Places of the answers in rows and replies, besides the settings of the files."""

        template: str = BOXED
        gold: Literal["boxed", "hashes", "whole"] = "hashes"
        """Position of the answer in the answer column: `hashes` for GSM8K, `boxed` for MATH's
        solutions, `whole` for a column of bare answers."""
        unparsed_gold: Literal["refuse", "skip"] = "refuse"
        """Treatment of rows whose answer cannot be read: refuse the first with an error, or skip
        and count.
        """
        reply: Literal["boxed", "hashes", "whole"] = "boxed"
        """Position where the model must put its answer, after any thoughts; `whole` looks for it
        anywhere, as math-verify does."""
        format_reward: float = 0.0
        """Share of the reward for a finished reply with an answer in its place, right or wrong."""

        def __post_init__(self) -> None:
            # Not super(), which does not work in a dataclass with slots.
            DatasetTask.Config.__post_init__(self)
            check_bounds(self, "format_reward", at_least=0, at_most=1)
            if self.columns.answer is None:
                raise ValueError("columns.answer is None, but a reply is graded against the answer")

    config: Config

    def convert(self, problem: Problem, row: Mapping[str, Any]) -> Problem:
        gold = find_answer(problem.answer, self.config.gold)
        return dataclasses.replace(problem, answer="" if gold is None else gold)

    def usable(self, problem: Problem) -> bool:
        if problem.answer and (
            parse_value(problem.answer) is not None or _is_readable(problem.answer)
        ):
            return True
        if self.config.unparsed_gold == "skip":
            return False
        content = "no answer"
        if problem.answer:
            content = f"{problem.answer!r}, which math-verify cannot read"
        raise ValueError(
            f"column {self.config.columns.answer!r} has {content} (gold={self.config.gold!r}); "
            "choose another place, or unparsed_gold='skip'"
        )

    def rubric(self, *, seed: int) -> Rubric:
        """Give 1 for a right answer, and `format_reward` for the form alone."""
        config = self.config
        # Now rather than in the reward process: a missing package is an error before the run.
        import_for_tasks("math_verify", needed_by="grading mathematics")
        answer = MathAnswer(place=config.reply)
        share, is_there = config.format_reward, AnswerInPlace(place=config.reply)
        criteria = [Criterion(name="answer", function=answer, weight=1.0 - share)]
        if share:
            criteria.append(Criterion(name="format", function=is_there, weight=share))
        return Rubric(criteria=tuple(criteria), correct=Solved(reward=answer))


@dataclass(frozen=True, kw_only=True, slots=True)
class MathAnswer:
    """Reward function: 1 for the right answer, 0 for a wrong one."""

    place: Place

    def __call__(self, rollout: Rollout) -> float:
        """Grade the reply; raises UnparsedAnswer if it has no readable answer in its place."""
        answer = required_answer(rollout, self.place)
        is_right = compare_answers(rollout.prompt.problem.answer, answer, self.place)
        if is_right is None:
            raise UnparsedAnswer(f"math-verify cannot read {truncate(answer, most=200)!r}")
        return float(is_right)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerInPlace:
    """Reward function: 1 for a whole reply that has something in the answer's place."""

    place: Place

    def __call__(self, rollout: Rollout) -> float:
        is_whole = not rollout.completion.is_cut_off
        return float(is_whole and find_answer(rollout.text, self.place) is not None)


@functools.lru_cache(maxsize=4096)
def compare_answers(gold: str, answer: str, place: Place) -> bool | None:
    """Compare two answers, by value if they are bare numbers, else with math-verify.

    Returns None if math-verify cannot read the second.

    math-verify's own time limits use the main thread's alarm, so they are off: the time limit of
    the reward process ends a comparison that hangs.
    """
    math_verify = import_for_tasks("math_verify", needed_by="grading mathematics")
    value = parse_value(gold)
    if value is not None and value == parse_value(answer):
        return True
    # In a box, the whole answer is one expression; outside, math-verify looks for one in a text.
    answer = _to_latex(answer)
    parsed = _parse(_wrap_in_box(answer), timeout_s=None) if place != "whole" else []
    if place == "whole" or (place == "hashes" and (not parsed or _is_number_in_words(answer))):
        parsed += _parse(answer, timeout_s=None)
    if not parsed:
        return None
    # math-verify warns that its time limits are off.
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    return bool(math_verify.verify(list(_parse_gold(gold)), parsed, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    return tuple(_parse(_wrap_in_box(_to_latex(gold)), timeout_s=None))


def _is_readable(gold: str) -> bool:
    # math-verify limits its time by an alarm, which only the main thread may set.
    in_main_thread = threading.current_thread() is threading.main_thread()
    timeout_s = GOLD_TIMEOUT_S if in_main_thread else None
    return bool(_parse(_wrap_in_box(_to_latex(gold)), timeout_s=timeout_s))


def _is_number_in_words(answer: str) -> bool:
    """Return True for an answer such as "18 dollars.".

    Of several numbers, math-verify would accept any.
    """
    return _WORD.search(answer) is not None and len(find_numbers(answer)) == 1


def _to_latex(text: str) -> str:
    """Return the text with ASCII digits, and one-character powers and fractions in LaTeX."""

    def write(symbol: re.Match[str]) -> str:
        if symbol[0] in _POWERS:
            return _POWERS[symbol[0]]
        above, below = unicodedata.normalize("NFKC", symbol[0]).split("\u2044")
        return f"\\frac{{{above}}}{{{below}}}"

    return convert_digits(_SYMBOL.sub(write, text))


def _parse(text: str, *, timeout_s: int | None) -> list[Any]:
    """Return the expressions that the text may mean; none if it cannot be read."""
    math_verify = import_for_tasks("math_verify", needed_by="grading mathematics")
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
    return list(math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=timeout_s))


def _wrap_in_box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
