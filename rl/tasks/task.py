"""The protocol of a task (problems, their split, environments, rubric), and answers in replies.

A new task usually subclasses `GeneratedTask` (problems drawn at random) or `DatasetTask` (rows of
files), and overrides two methods. Any object with these five methods will do.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rl.protocols import Environment
from rl.rollouts.replies import answer_part
from rl.rollouts.rubric import Rubric, UnparsedAnswer
from rl.types import Problem, Rollout, Turn
from rl.utils.numbers import find_last_number

_BOX = re.compile(r"\\boxed\s*\{")


class Task(Protocol):
    """Everything that a run needs to know of its task."""

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless training problems, disjoint from `eval_sets`, the same for a seed."""
        ...

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems with demonstrations for a warm-up, disjoint from `eval_sets`."""
        ...

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Return fixed held-out sets by name, the same for every seed.

        A run's curve shows the first.
        """
        ...

    def environment(self, problem: Problem) -> Environment:
        """Return a new environment for one episode of a problem."""
        ...

    def rubric(self, *, seed: int) -> Rubric:
        """Return the rubric that grades rollouts; `seed` fixes random rewards."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """Correctness: True if a reward function gives at least `at`.

    A reply without an answer is wrong.
    """

    reward: Callable[[Rollout], float]
    at: float = 1.0

    def __call__(self, rollout: Rollout) -> bool:
        try:
            return self.reward(rollout) >= self.at
        except UnparsedAnswer:
            return False


Place = Literal["boxed", "hashes", "tags", "last_line", "last_number", "whole"]
"""Position of an answer in a text: in the last `\\boxed{}`, after the last `####`, in the last
`<answer></answer>`, in the last line, the last number (`rl.utils.numbers`), or the whole text."""


def complete_answer(turn: Turn) -> str | None:
    """Return a reply after any thoughts; None if it was cut off, since more could have followed."""
    return None if turn.completion.is_cut_off else answer_part(turn.text)


def find_answer(text: str, place: Place, *, is_cut_off: bool = False) -> str | None:
    r"""Return the text in the answer's place, after any thoughts; None if there is none.

    With `last_number`, the number is as `rl.utils.numbers` writes it: 1,000 as 1000. In a reply
    that was cut off, an answer that nothing ends might go on, and counts as none: `#### 12` could
    have become 123. Braces, `</answer>`, and the end of the line after `####` are such ends.
    """
    # Before `answer_part` strips the text.
    ends_line = "\n" in text[len(text.rstrip()) :]
    text = answer_part(text)
    answer: str | None
    if place == "hashes":
        _, mark, after = text.rpartition("####")
        answer, end, _ = after.strip().partition("\n")
        if not mark or (is_cut_off and not end and not ends_line):
            answer = None
    elif place == "boxed":
        answer = _find_last_boxed(text)
    elif place == "tags":
        _, mark, after = text.rpartition("<answer>")
        inner, end, _ = after.partition("</answer>")
        # An answer that is not closed might go on, whether the reply was cut off or not.
        answer = inner if mark and end else ""
    elif place == "last_number":
        answer = find_last_number(text, is_cut_off=is_cut_off)
    elif is_cut_off:
        # Nothing ends a last line or a whole reply but the end of the reply.
        answer = None
    else:
        answer = text.rpartition("\n")[2] if place == "last_line" else text
    return (answer or "").strip() or None


def required_answer(rollout: Rollout, place: Place) -> str:
    """Return the answer of the last reply.

    Raises UnparsedAnswer if there is none, or only the beginning of one.
    """
    cut_off = rollout.completion.is_cut_off
    answer = find_answer(rollout.text, place, is_cut_off=cut_off)
    if answer is None:
        raise UnparsedAnswer(f"no {'complete ' * cut_off}answer in its place ({place})")
    return answer


def _find_last_boxed(text: str) -> str:
    # The last box counts, also one that is never closed.
    last = deque(_BOX.finditer(text), maxlen=1)
    if not last:
        return ""
    # By hand, because an answer may have braces of its own, as \boxed{\frac{1}{2}} has.
    depth = 1
    for end in range(last[0].end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[last[0].end() : end]
    return ""  # the brace was never closed


def get_sendable_state(task: object) -> dict[str, Any]:
    """Return the attributes of a task that pickle, for its `__getstate__`.

    Reward functions may be methods of a task, which take the task along to the reward process. What
    its environments share, such as a client of an event loop, stays here.
    """
    # Tried one by one: a client may be anywhere in an attribute of a user's class.
    state = {}
    for name, value in vars(task).items():
        with suppress(Exception):  # whatever a user's class raises
            pickle.dumps(value)
            state[name] = value
    return state
