"""Fingerprint of a task's training problems and evaluation sets, kept in checkpoints.

A run continues at a number in the order of its problems. With other problems at the numbers before,
it would train on some again and never on others, without a word.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from rl.tasks.data import ListedProblems, ProblemsByNumber
from rl.tasks.task import Task
from rl.types import Problem, ProblemsFingerprint

NUM_SAMPLED = 64
"""Problems of an endless task whose digests are kept: its first ones."""
MAX_DIGESTS = 256
"""Most digests of a fingerprint; above it, each digest is of several problems."""


def hash_problem(problem: Problem, *others: Any) -> str:
    """Return 64 bits of a problem's texts, as hexadecimal digits, and of further JSON values."""
    texts = [problem.id, problem.question, problem.answer, *problem.demonstrations, *others]
    return _hash_parts([json.dumps(texts, sort_keys=True, default=_describe)])


def _describe(value: Any) -> str:
    """Return an image or another object as text, without its address.

    The address is another in each process.
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def make_fingerprint(task: Task, *, seed: int, block: int | None = None) -> ProblemsFingerprint:
    """Return the fingerprint of a run's problems.

    `block` is that of a fingerprint to compare with.
    """
    problems = task.train_problems(seed=seed)
    listed = _get_listed(problems)
    num: int | None
    if listed is not None:
        num = listed.num
        digests = [listed.digest_at(i) for i in range(listed.num)]
        order = listed.order
    else:
        # A generated task is a function of its config and the seed: its first problems tell it.
        first_problems = list(islice(problems, NUM_SAMPLED))
        num = None if len(first_problems) == NUM_SAMPLED else len(first_problems)
        digests = [hash_problem(problem) for problem in first_problems]
        order = f"drawn by seed {seed}"
    # A data set of millions of rows must not make its checkpoints large.
    block = block or max(1, -(-len(digests) // MAX_DIGESTS))
    blocks = [digests[i : i + block] for i in range(0, len(digests), block)]
    return ProblemsFingerprint(
        num=num,
        order=order,
        block=block,
        digests=tuple(map(_hash_parts, blocks)),
        eval_sets={name: _describe_set(held_out) for name, held_out in task.eval_sets().items()},
    )


def describe_changes(
    saved: ProblemsFingerprint, task: Task, *, seed: int
) -> tuple[list[str], list[str]]:
    """Return what differs now: of the training problems, and of the evaluation sets."""
    now = make_fingerprint(task, seed=seed, block=saved.block)
    changes = []
    if now.num != saved.num:
        changes.append(
            f"{_format_number(saved.num)} training problems, now {_format_number(now.num)}"
        )
    if now.order != saved.order:
        changes.append(f"they were {saved.order}, and are {now.order} now")
    first = _find_first_difference(saved.digests, now.digests)
    if first is not None:
        changes.append(
            f"the first difference is {_place(first * saved.block, saved.block, task, seed=seed)}"
        )

    changes_of_sets = []
    for name in {**saved.eval_sets, **now.eval_sets}:
        before, after = saved.eval_sets.get(name, "none"), now.eval_sets.get(name, "none")
        if before != after:
            changes_of_sets.append(f"evaluation set {name!r}: {before}, now {after}")
    return changes, changes_of_sets


def _find_first_difference(before: Sequence[str], after: Sequence[str]) -> int | None:
    """Return the index at which two sequences first differ, also by ending."""
    for i, pair in enumerate(zip(before, after, strict=False)):
        if pair[0] != pair[1]:
            return i
    return None if len(before) == len(after) else min(len(before), len(after))


def _describe_set(problems: Sequence[Problem]) -> str:
    return f"{len(problems)} problems {_hash_parts(map(hash_problem, problems))}"


def _hash_parts(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    # A text of a file may hold half of a surrogate pair, which has no UTF-8.
    for part in parts:
        digest.update(part.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _format_number(num: int | None) -> str:
    return "endless" if num is None else str(num)


def _place(number: int, block: int, task: Task, *, seed: int) -> str:
    """Return the number of a problem, from 1, with the id of the problem that is there now."""
    if block > 1:
        return f"in problems {number + 1} to {number + block}"
    problems = task.train_problems(seed=seed)
    listed = _get_listed(problems)
    if listed is None:
        problem = next(islice(problems, number, None), None)
    else:
        problem = listed.problem_at(number) if number < listed.num else None
    return f"problem {number + 1}" if problem is None else f"problem {number + 1} ({problem.id})"


def _get_listed(problems: Iterable[Problem]) -> ListedProblems | None:
    """Return the list that a task repeats, with the digest of each problem, if it has one."""
    return problems.listed if isinstance(problems, ProblemsByNumber) else None
