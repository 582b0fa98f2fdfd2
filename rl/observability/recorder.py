"""Recorded rollouts: rollouts.jsonl, one JSON object a line, of bounded size.

    {"step": 3, "kind": "train", "advantage": 0.5, "problem": "sum-digits/47-82", "answer": "21",
    "sample": 0,
     "reward": 1.0, "correct": true, "parts": {"answer": 1.0}, "end": "done", "turns": [{"messages":
     [...], "reply": "...", "prompt_ids": [...], "token_ids": [...], "logprobs": [...],
     "policy_versions": [...], "trainer_logprobs": [...], "advantages": 0.5, "mask": 1}]}

`kind` is train, dropped (with the reason), pending (not yet trained on when the run stopped), eval
(greedy) or eval_sampled (with the set). `logprobs` are the generator's, in nats. Only `train` has
the last three: the trainer's logprobs in the pass that computed the gradient, NaN for tokens that
were cut off; advantages; and the mask, 1 for tokens that were trained on. Versions, advantages and
mask are one number if all tokens have the same. Numbers that are not finite are strings, as in
metrics.jsonl.

Shape legend: P groups, G scored rollouts of each, C tokens that the model produced, in all turns.
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
from rl.tasks.data import write_pass_rates
from rl.types import Rollout, Score, Turn
from rl.utils.errors import optional_write
from rl.utils.files import BoundedFile, json_lines, previous_file

logger = logging.getLogger(__name__)

PASS_RATES = "pass_rates.jsonl"


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
class TrainedRollout:
    """Training data of a scored rollout's tokens."""

    advantages: np.ndarray
    """[C] float32."""
    mask: np.ndarray | None = None
    """[C] bool, True for tokens that were trained on; None if unknown."""
    trainer_logprobs: np.ndarray | None = None
    """[C] float32, nats; NaN for tokens that were cut off. None if the trainer did not return them.
    """

    def by_turn(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        values = {"advantages": self.advantages, "trainer_logprobs": self.trainer_logprobs}
        values["mask"] = None if self.mask is None else self.mask.astype(np.int8)
        ends = np.cumsum([len(turn.completion.token_ids) for turn in turns])[:-1]
        parts = {name: np.split(v, ends) for name, v in values.items() if v is not None}
        short = {"advantages": _shortest, "mask": _shortest, "trainer_logprobs": _rounded}
        return [{name: short[name](of[i]) for name, of in parts.items()} for i in range(len(turns))]


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


class Recorder:
    """Writer of rollouts.jsonl, which replaces rollouts.1.jsonl when it has half of the allowed
    size.
    """

    def __init__(self, path: Path, *, config: RecorderConfig) -> None:
        self.path = path
        self.config = config

    def recorded_ids(self, groups: Sequence[Group]) -> list[RolloutId]:
        """Return the ids of the rollouts whose tokens `step` will record."""
        if not (self.config.enable and self.config.tokens):
            return []
        chosen = self._chosen([(group, (), {}) for group in groups])
        return [entry.id for entry in chosen if entry.id is not None]

    def step(self, step: int, batch: Batch, trained_PG: Sequence[Sequence[TrainedRollout]]) -> None:
        """Record a step's groups, in order, and the groups that were dropped before it."""
        head = {"step": step, "kind": "train"}
        pairs = zip(batch.groups, trained_PG, strict=True)
        self._record([(group, trained, head) for group, trained in pairs], step, batch)

    def stopped(self, step: int, batch: Batch) -> None:
        """Record the producer's groups when the run stopped before this step's batch."""
        head = {"step": step, "kind": "pending"}
        self._record([(group, (), head) for group in batch.groups], step, batch)

    def _record(self, groups: Sequence[Candidates], step: int, batch: Batch) -> None:
        head = {"step": step, "kind": "dropped"}
        dropped: list[Candidates] = [
            (group, (), {**head, "dropped": why}) for why, group in batch.dropped
        ]
        self._append([*self._chosen(groups), *self._chosen(dropped)])

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation, and write pass_rates.jsonl if problems were sampled several times.

        The pass rate of a problem is its share of right replies, for a difficulty filter.
        """
        chosen: list[Entry] = []
        for done in result.sets:
            for kind, groups in (
                ("eval", [[pair] for pair in done.greedy]),
                ("eval_sampled", done.sampled),
            ):
                head = {"step": step, "set": done.name, "kind": kind}
                entries = [
                    [Entry(rollout=r, score=s, head=head) for r, s in group] for group in groups
                ]
                num = (
                    len(entries)
                    if self.config.num_eval_problems is None
                    else self.config.num_eval_problems
                )
                chosen += _first_and_odd(entries, num, most=max(map(len, entries), default=0))
        self._append(chosen)
        if self.config.enable and (rates := result.pass_rates()):
            file = self.path.with_name(PASS_RATES)
            with optional_write(file):
                write_pass_rates(file, rates)

    def _chosen(self, groups: Sequence[Candidates]) -> list[Entry]:
        num = len(groups) if self.config.num_groups is None else self.config.num_groups
        entries_PG = [
            _entries(group, trained, number=p, head=head)
            for p, (group, trained, head) in enumerate(groups)
            if p < num or any(map(_is_odd, group.scores))
        ]
        most = max((len(group.rollouts) for group, _, _ in groups), default=0)
        return list(_first_and_odd(entries_PG, num, most=most))

    def _line(self, entry: Entry) -> dict[str, Any]:
        rollout, score, trained = entry.rollout, entry.score, entry.trained
        turns = [self._turn(turn) for turn in rollout.turns]
        if trained is not None and self.config.tokens:
            for fields, more in zip(turns, trained.by_turn(rollout.turns), strict=True):
                fields |= more
        line = {
            **entry.head,
            "advantage": None if trained is None else _shortest(trained.advantages),
            "problem": rollout.prompt.problem.id,
            "answer": rollout.prompt.problem.answer,
            "sample": rollout.sample,
            "reward": score.reward,
            "correct": score.correct,
            "parts": score.parts,
            "end": rollout.end,
            "failure": score.failure,
            "unparsed": score.unparsed or None,
            "turns": turns,
        }
        return {name: value for name, value in line.items() if value is not None}

    def _turn(self, turn: Turn) -> dict[str, Any]:
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
                "logprobs": _rounded(completion.logprobs),
                "policy_versions": _shortest(completion.policy_versions),
            }
        return {name: value for name, value in fields.items() if value is not None}

    def _append(self, entries: Sequence[Entry]) -> None:
        if not self.config.enable:
            return
        file = BoundedFile(self.path, max_bytes=int(self.config.max_megabytes * 1e6))
        with optional_write(self.path), closing(file):
            for entry in entries:
                line = to_json(self._line(entry)) + "\n"
                if len(line) > file.max_line:
                    logger.warning(
                        "a rollout of %d bytes is too long for %s", len(line), self.path.name
                    )
                elif file.append(line):
                    logger.info("%s is full: the oldest rollouts are dropped", self.path.name)


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rollouts of both files, oldest first, without damaged lines."""
    parts = (previous_file(path), path)
    return [rollout for part in parts for _, rollout in json_lines(part) if rollout is not None]


def _entries(
    group: Group, trained: Iterable[TrainedRollout], *, number: int, head: Mapping[str, Any]
) -> list[Entry]:
    """Return the entries of group `number`; `trained` belongs to its scored rollouts, or is
    empty.
    """
    entries: list[Entry] = []
    of_scored = zip_longest(range(len(group.scored)), trained)
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if score.failure is not None:
            entries.append(Entry(rollout=rollout, score=score, head=head))
        else:
            sample, known = next(of_scored)
            entries.append(
                Entry(rollout=rollout, score=score, head=head, trained=known, id=(number, sample))
            )
    return entries


def _first_and_odd(entries_PG: Sequence[list[Entry]], num: int, *, most: int) -> Iterator[Entry]:
    """Yield the entries of the first `num` groups, and as many odd ones of others as `num` groups
    of `most` hold.
    """
    yield from chain.from_iterable(entries_PG[:num])
    yield from islice(
        (e for e in chain.from_iterable(entries_PG[num:]) if _is_odd(e.score)), num * most
    )


def _is_odd(score: Score) -> bool:
    """Return True for a failed or unparsed rollout, which is recorded from any group."""
    return score.failure is not None or bool(score.unparsed)


def _shortest(values: np.ndarray) -> list[float] | float:
    """Return one number if all are equal, else the list."""
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _rounded(logprobs: np.ndarray) -> list[float]:
    return [round(float(p), 6) for p in logprobs]
