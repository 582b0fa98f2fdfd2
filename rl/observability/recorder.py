"""Recorded rollouts: rollouts.jsonl, one JSON object a line, of bounded size.

    {"step": 3, "kind": "train", "advantage": 0.5, "problem": "sum-digits/47-82", "answer": "21",
    "sample": 0, "group": 0, "member": 0,
     "reward": 1.0, "correct": true, "parts": {"answer": 1.0}, "end": "done", "turns": [{"messages":
     [...], "reply": "...", "prompt_ids": [...], "token_ids": [...], "logprobs": [...],
     "policy_versions": [...], "trainer_logprobs": [...], "advantages": 0.5, "mask": 1}]}

`kind` is train, dropped (with the reason), pending (not yet trained on when the run stopped), eval
(greedy) or eval_sampled (with the set). `logprobs` are the generator's, in nats. Only `train` has
the last three: the trainer's logprobs in the pass that computed the gradient, NaN for tokens that
were not trained on; advantages; and the mask, 1 for tokens that were trained on. Versions,
advantages and mask are one number if all tokens have the same. Numbers that are not finite are
strings, as in metrics.jsonl. `group` and `member` are a trained rollout's place in its batch, by
which the ledger names it too.

`turns` are in the order in which they were asked. An episode that branches, or whose only branch is
not a plain one, also has its conversations, as indices of the turns; turns that are in no trained
branch have none of the last three:

    "branches": [{"turns": [0, 1], "role": "main", "cause": "", "trained": true},
     {"turns": [0, 2], "role": "superseded", "cause": "again", "trained": false}]

`state` is what the episode left for reward functions, if anything, with long texts cut.

Shape legend: P groups, G scored rollouts of each, C tokens that the model produced, in all trained
turns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.configurable import only_if
from rl.config.tree import check_bounds
from rl.observability.metrics import to_json
from rl.rollouts.evaluation import EvaluationResult
from rl.rollouts.group import Group, RolloutId
from rl.rollouts.producer import Batch
from rl.rollouts.samples import find_places
from rl.rollouts.trained import TrainedRollout
from rl.tasks.data import write_pass_rates
from rl.types import Branch, Rollout, Score, Turn
from rl.utils.errors import warn_unwritten
from rl.utils.files import BoundedFile, get_previous_file, read_json_lines
from rl.utils.printing import describe_value, truncate

logger = logging.getLogger(__name__)

PASS_RATES = "pass_rates.jsonl"
MAX_STATE_ITEMS, MAX_STATE_DEPTH = 100, 3
"""Most items of a list or a mapping in a recorded state, and levels of them; what is deeper is
recorded as its repr."""


# What is recorded


@dataclass(kw_only=True, slots=True)
class RecorderConfig:
    """Selection of the rollouts in rollouts.jsonl."""

    enable: bool = True
    """Record rollouts."""
    num_groups: int | None = field(default=2, metadata=only_if("enable", True))
    """Number of groups recorded from each step (the first ones), and from those dropped before it.
    Of other groups only rollouts that failed or have no answer are recorded, up to as many
    rollouts. None: all groups.
    """
    num_eval_problems: int | None = field(default=32, metadata=only_if("enable", True))
    """Number of problems recorded from each evaluation set, and of failed rollouts of others. None:
    all.
    """
    tokens: bool = field(default=True, metadata=only_if("enable", True))
    """Record token ids, logprobs of generator and trainer, policy versions, advantages and mask."""
    max_megabytes: float = field(default=256.0, metadata=only_if("enable", True))
    """Largest size of rollouts.jsonl and rollouts.1.jsonl together; the oldest rollouts are
    dropped.
    """

    def __post_init__(self) -> None:
        check_bounds(self, "num_groups", "num_eval_problems", at_least=0)
        check_bounds(self, "max_megabytes", above=0, below=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """Candidate for a line of the file."""

    rollout: Rollout
    score: Score
    head: Mapping[str, Any]
    trained: TrainedRollout | None = None
    id: RolloutId | None = None
    """Position of a scored rollout in its batch."""


Candidates = tuple[Group, Sequence[TrainedRollout], Mapping[str, Any]]
"""A group, what is known of the training on its scored rollouts (or nothing), and the head of their
lines.
"""


# The file


class Recorder:
    """Writer of rollouts.jsonl, which replaces rollouts.1.jsonl at half of the allowed size."""

    def __init__(self, path: Path, *, config: RecorderConfig) -> None:
        self.path = path
        self.config = config

    def choose_ids(self, groups: Sequence[Group]) -> list[RolloutId]:
        """Return the ids of the rollouts whose tokens `step` will record."""
        if not (self.config.enable and self.config.tokens):
            return []
        entries = self._choose(_make_candidates(groups, {}))
        # A failed rollout is recorded too, but has no id, as nothing was trained on it.
        return [entry.id for entry in entries if entry.id is not None]

    def step(self, step: int, batch: Batch, trained_PG: Sequence[Sequence[TrainedRollout]]) -> None:
        """Record a step's groups, in order, and the groups that were dropped before it."""
        head = {"step": step, "kind": "train"}
        pairs = zip(batch.groups, trained_PG, strict=True)
        self._record([(group, trained, head) for group, trained in pairs], step, batch)

    def record_pending(self, step: int, batch: Batch) -> None:
        """Record the producer's groups when the run stopped before this step's batch."""
        head = {"step": step, "kind": "pending"}
        self._record(_make_candidates(batch.groups, head), step, batch)

    def _record(self, groups: Sequence[Candidates], step: int, batch: Batch) -> None:
        dropped: list[Candidates] = []
        for reason, group in batch.dropped:
            dropped.append((group, (), {"step": step, "kind": "dropped", "dropped": reason}))
        # Each kind has its own `num_groups`, or many dropped groups would leave no trained group.
        self._append([*self._choose(groups), *self._choose(dropped)])

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation, and write pass_rates.jsonl if problems were sampled several times.

        The pass rate of a problem is its share of right replies, for a difficulty filter.
        """
        entries: list[Entry] = []
        for done in result.sets:
            greedy = [[pair] for pair in done.greedy]
            for kind, groups in (("eval", greedy), ("eval_sampled", done.sampled)):
                head = {"step": step, "set": done.name, "kind": kind}
                entries += self._choose_evaluated(groups, head)
        self._append(entries)

        rates = result.pass_rates()
        if self.config.enable and rates:
            file = self.path.with_name(PASS_RATES)
            with warn_unwritten(file):
                write_pass_rates(file, rates)

    def _choose(self, groups: Sequence[Candidates]) -> list[Entry]:
        num = len(groups) if self.config.num_groups is None else self.config.num_groups
        entries_PG: list[list[Entry]] = []
        group_size = 0
        for p, (group, trained, head) in enumerate(groups):
            group_size = max(group_size, len(group.rollouts))
            # A step has hundreds of groups: entries are made only of those that may be chosen.
            if p < num or any(map(_is_odd, group.scores)):
                entries_PG.append(_make_entries(group, trained, number=p, head=head))
        return list(_choose_first_and_odd(entries_PG, num, most=group_size))

    def _choose_evaluated(
        self, groups: Sequence[Sequence[tuple[Rollout, Score]]], head: Mapping[str, Any]
    ) -> Iterator[Entry]:
        entries_PG: list[list[Entry]] = []
        for group in groups:
            entries = [Entry(rollout=r, score=s, head=head) for r, s in group]
            entries_PG.append(entries)
        num = self.config.num_eval_problems
        num = len(entries_PG) if num is None else num
        return _choose_first_and_odd(entries_PG, num, most=max(map(len, entries_PG), default=0))

    def _append(self, entries: Sequence[Entry]) -> None:
        if not self.config.enable:
            return
        file = BoundedFile(self.path, max_bytes=int(self.config.max_megabytes * 1e6))
        with warn_unwritten(self.path), closing(file):
            for entry in entries:
                line = to_json(self._describe(entry)) + "\n"
                if len(line) > file.max_line:
                    logger.warning(
                        "a rollout of %d bytes is too long for %s", len(line), self.path.name
                    )
                elif file.append(line):
                    logger.info("%s is full: the oldest rollouts are dropped", self.path.name)

    def _describe(self, entry: Entry) -> dict[str, Any]:
        """Return the object of an entry's line."""
        rollout, score, trained = entry.rollout, entry.score, entry.trained
        turns = [self._describe_turn(turn) for turn in rollout.turns]
        if trained is not None and self.config.tokens:
            for index, tokens in find_places(rollout).items():
                turns[index] |= _describe_training(trained, tokens)
        group, member = (None, None) if trained is None or entry.id is None else entry.id
        line = {
            **entry.head,
            "advantage": None if trained is None else _fold_equal(trained.advantages),
            "problem": rollout.prompt.problem.id,
            "answer": rollout.prompt.problem.answer,
            "sample": rollout.sample,
            # The place of its rows in the step's file of the ledger.
            "group": group,
            "member": member,
            "reward": score.reward,
            "correct": score.correct,
            "parts": score.parts,
            "end": rollout.end,
            "failure": score.failure,
            "unparsed": score.unparsed or None,
            "state": _bound_state(rollout.state) if rollout.state else None,
            "branches": _describe_branches(rollout.branches),
            "turns": turns,
        }
        return _drop_none(line)

    def _describe_turn(self, turn: Turn) -> dict[str, Any]:
        completion = turn.completion
        fields: dict[str, Any] = {
            "messages": [{"role": m.role, "content": m.content} for m in turn.messages],
            "reply": turn.text,
            "finish_reason": completion.finish_reason,
            "reward": turn.observation.reward or None,
            "metrics": turn.observation.metrics or None,
        }
        if self.config.tokens:
            fields |= {
                "prompt_ids": turn.prompt_ids,
                "token_ids": completion.token_ids,
                "logprobs": _round(completion.logprobs),
                "policy_versions": _fold_equal(completion.policy_versions),
            }
        return _drop_none(fields)


def _describe_training(trained: TrainedRollout, tokens: slice) -> dict[str, Any]:
    """Return the fields of a trained turn, whose tokens have this place among the rollout's."""
    # With several minibatches the weights have moved since the pass that computed the gradient.
    logprobs_C, mask_C = trained.proximal_logprobs, trained.mask
    if logprobs_C is None:
        logprobs_C = trained.trainer_logprobs
    fields: dict[str, Any] = {"advantages": _fold_equal(trained.advantages[tokens])}
    if logprobs_C is not None:
        fields["trainer_logprobs"] = _round(logprobs_C[tokens])
    if mask_C is not None:
        # 0 and 1 are shorter than false and true, and there may be thousands.
        fields["mask"] = _fold_equal(mask_C[tokens].astype(np.int8))
    return fields


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rollouts of both files, oldest first, without damaged lines."""
    rollouts: list[dict[str, Any]] = []
    for part in (get_previous_file(path), path):
        for _, rollout in read_json_lines(part):
            if rollout is not None:
                rollouts.append(rollout)
    return rollouts


def _make_candidates(groups: Iterable[Group], head: Mapping[str, Any]) -> list[Candidates]:
    return [(group, (), head) for group in groups]


def _make_entries(
    group: Group, trained: Iterable[TrainedRollout], *, number: int, head: Mapping[str, Any]
) -> list[Entry]:
    """Return the entries of group `number`; `trained` is of its scored rollouts, or empty."""
    entries: list[Entry] = []
    of_scored = zip_longest(range(len(group.scored)), trained)
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if score.failure is not None:
            # A rollout that could not be scored was not trained on.
            entries.append(Entry(rollout=rollout, score=score, head=head))
        else:
            sample, training = next(of_scored)
            entries.append(
                Entry(
                    rollout=rollout, score=score, head=head, trained=training, id=(number, sample)
                )
            )
    return entries


def _choose_first_and_odd(
    entries_PG: Sequence[list[Entry]], num: int, *, most: int
) -> Iterator[Entry]:
    """Yield the entries of the first `num` groups, and odd entries of the other groups.

    These are at most as many as `num` groups of `most` hold: a broken reward function makes every
    rollout of a step odd.
    """
    yield from chain.from_iterable(entries_PG[:num])
    others = chain.from_iterable(entries_PG[num:])
    yield from islice((entry for entry in others if _is_odd(entry.score)), num * most)


def _is_odd(score: Score) -> bool:
    """Return True for a failed or unparsed rollout, which is recorded from any group."""
    return score.failure is not None or bool(score.unparsed)


def _describe_branches(branches: Sequence[Branch]) -> list[dict[str, Any]] | None:
    """Return the branches' objects; None for a linear episode."""
    if len(branches) == 1 and branches[0].is_plain:
        return None
    described: list[dict[str, Any]] = []
    for branch in branches:
        described.append(
            {
                "turns": branch.turns,
                "role": branch.role,
                "cause": branch.cause,
                "trained": branch.is_trained,
            }
        )
    return described


def _bound_state(value: Any, depth: int = 0) -> Any:
    """Return a state that is short enough for a line, of values that JSON has."""
    if value is None or isinstance(value, bool | int | float | np.number):
        return value
    if isinstance(value, str):
        return truncate(value)
    if depth < MAX_STATE_DEPTH:
        if isinstance(value, Mapping):
            items = [*islice(value.items(), MAX_STATE_ITEMS)]
            return {truncate(str(key)): _bound_state(item, depth + 1) for key, item in items}
        if isinstance(value, list | tuple):
            return [_bound_state(item, depth + 1) for item in value[:MAX_STATE_ITEMS]]
    return describe_value(value)


def _drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _fold_equal(values: np.ndarray) -> list[float] | float:
    """Return one number if all are equal, else the list."""
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _round(logprobs: np.ndarray) -> list[float]:
    # Float32 has about six digits; Python would write the 17 of a double.
    return [round(float(logprob), 6) for logprob in logprobs]
