"""What the model wrote, on disk: rollouts.jsonl, one JSON object a rollout, of bounded size.

    {"step": 3, "kind": "train", "advantage": 0.5, "problem": "sum-digits/47-82", "answer": "21", "sample": 0,
     "reward": 1.0, "correct": true, "parts": {"answer": 1.0}, "end": "done", "turns": [{"messages": [...],
     "reply": "...", "prompt_ids": [...], "token_ids": [...], "logprobs": [...], "policy_versions": [...],
     "trainer_logprobs": [...], "advantages": 0.5, "mask": 1}]}

`kind` is train, dropped (with the reason why its group was), pending (no step had taken it when the run
stopped), eval (greedy) or eval_sampled (with the set).
`logprobs` are the generator's, in nats. The last three are of `train` alone: the trainer's logprobs, of the
pass that the gradient was computed in; advantages; 1 for a token that was trained on, 0 for one that was not.
Versions, advantages and mask are one number, or one a token where they differ. A number that is not finite is
written as a text, as in metrics.jsonl: JSON has none. So is the trainer's logprob of what was cut off.

Shape legend: P groups, G scored rollouts of each, C tokens that the model produced, in all turns.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rl.data.difficulty import write_pass_rates
from rl.observability.whole_lines import WholeLines
from rl.rollouts.evaluation import EvaluationResult
from rl.rollouts.grading import failure_of
from rl.rollouts.group import Group, Place
from rl.rollouts.producer import Batch
from rl.types import Rollout, Score, Turn

logger = logging.getLogger(__name__)

PASS_RATES = "pass_rates.jsonl"


@dataclass(kw_only=True, slots=True)
class RecorderConfig:
    """Which rollouts are written to rollouts.jsonl."""

    enable: bool = True
    """Write any."""
    num_groups: int | None = 2
    """Groups of each step that are written, the first ones, and as many of those that were dropped before it.
    Rollouts that failed, or in which no answer was found, are written of every other group too, up to as many
    rollouts. None: all groups."""
    num_eval_problems: int | None = 32
    """Problems of each evaluation set that are written, and as many odd rollouts of others. None: all."""
    tokens: bool = True
    """Token ids, logprobs of generator and trainer, policy versions, advantages and mask too."""
    max_megabytes: float = 256.0
    """Of the file and the one before it, rollouts.1.jsonl, together: the oldest rollouts make room."""

    def __post_init__(self) -> None:
        if (self.num_groups or 0) < 0 or (self.num_eval_problems or 0) < 0:
            raise ValueError(
                f"num_groups={self.num_groups}, num_eval_problems={self.num_eval_problems}: must be at "
                "least 0, or None for all"
            )
        if not 0 < self.max_megabytes < math.inf:
            raise ValueError(f"max_megabytes={self.max_megabytes}: must be above 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRollout:
    """What a step knows of the tokens of a scored rollout."""

    advantages: np.ndarray
    """[C] float32."""
    mask: np.ndarray | None = None
    """[C] bool, True where the token was trained on; None where nobody asked."""
    trainer_logprobs: np.ndarray | None = None
    """[C] float32, nats; NaN of a token that was cut off. None where the trainer was not asked, or did not
    get as far."""

    def of_turns(self, turns: Sequence[Turn]) -> list[dict[str, np.ndarray]]:
        """What the line says of each turn."""
        values = {
            "trainer_logprobs": self.trainer_logprobs,
            "advantages": self.advantages,
            "mask": None if self.mask is None else self.mask.astype(np.int8),
        }
        ends = np.cumsum([len(turn.completion.token_ids) for turn in turns])[:-1]
        parts = {name: np.split(v, ends) for name, v in values.items() if v is not None}
        return [{name: of[i] for name, of in parts.items()} for i in range(len(turns))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """A rollout that may get a line."""

    rollout: Rollout
    score: Score
    said: Mapping[str, Any]
    """With which the line begins."""
    trained: TrainedRollout | None = None
    place: Place | None = None
    """In its batch, of one that was scored."""

    @property
    def is_odd(self) -> bool:
        """Written of every group."""
        return failure_of(self.rollout, self.score) is not None or bool(self.score.unparsed)


class Recorder:
    """Appends lines; when the file has half of what it may, it takes the place of the one before."""

    def __init__(self, path: Path, *, config: RecorderConfig) -> None:
        self.path = path
        self.config = config
        self._fails = False

    def places(self, groups: Sequence[Group]) -> list[Place]:
        """Of the rollouts whose tokens `step` will write: what it is told of others is not looked at."""
        if not (self.config.enable and self.config.tokens):
            return []
        chosen = self._chosen([_entries(group, number=p) for p, group in enumerate(groups)])
        return [entry.place for entry in chosen if entry.place is not None]

    def step(self, step: int, batch: Batch, trained_PG: Sequence[Sequence[TrainedRollout]]) -> None:
        """Of a step's groups, in order, and of those that were dropped before it."""
        self._append(self._of_step(step, batch, trained_PG))

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Of each set's problems, in order; where some were drawn several times, also pass_rates.jsonl with
        the share of right replies to each, for a difficulty filter."""
        self._append(self._of_evaluation(step, result))
        if self.config.enable and (rates := result.pass_rates()):
            with self._going_on(PASS_RATES):
                write_pass_rates(self.path.with_name(PASS_RATES), rates)

    def stopped(self, step: int, batch: Batch) -> None:
        """Of what the producer had when the run stopped before this step's batch."""
        pending = [_entries(group, step=step, kind="pending") for group in batch.groups]
        chosen = chain(self._chosen(pending), self._chosen(_dropped(step, batch)))
        self._append(self._line(entry) for entry in chosen)

    def stopped_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Of an evaluation in which too much failed, as far as it got; no rates."""
        self._append(self._of_evaluation(step, result))

    def _of_step(
        self, step: int, batch: Batch, trained_PG: Sequence[Sequence[TrainedRollout]]
    ) -> Iterator[dict[str, Any]]:
        trained = [
            _entries(group, of_group, step=step, kind="train")
            for group, of_group in zip(batch.groups, trained_PG, strict=True)
        ]
        for entry in chain(self._chosen(trained), self._chosen(_dropped(step, batch))):
            yield self._line(entry)

    def _chosen(self, entries_PG: Sequence[list[Entry]]) -> Iterator[Entry]:
        return _first_and_odd(entries_PG, self.config.num_groups)

    def _of_evaluation(self, step: int, result: EvaluationResult) -> Iterator[dict[str, Any]]:
        for done in result.sets:
            for kind, groups in (("eval", [[pair] for pair in done.greedy]), ("eval_sampled", done.sampled)):
                said = {"step": step, "set": done.name, "kind": kind}
                entries = [[Entry(rollout=r, score=s, said=said) for r, s in group] for group in groups]
                for entry in _first_and_odd(entries, self.config.num_eval_problems):
                    yield self._line(entry)

    def _line(self, entry: Entry) -> dict[str, Any]:
        rollout, score, trained = entry.rollout, entry.score, entry.trained
        line: dict[str, Any] = dict(entry.said)
        if trained is not None:
            line["advantage"] = _shortest(trained.advantages)
        line |= {
            "problem": rollout.prompt.problem.id,
            "answer": rollout.prompt.problem.answer,
            "sample": rollout.sample,
            "reward": score.reward,
            "correct": score.correct,
            "parts": dict(score.parts),
            "end": rollout.end,
        }
        if (failure := failure_of(rollout, score)) is not None:
            line["failure"] = failure
        if score.unparsed:
            line["unparsed"] = list(score.unparsed)
        turns = [self._turn(turn) for turn in rollout.turns]
        if trained is not None and self.config.tokens:
            for said, values in zip(turns, trained.of_turns(rollout.turns), strict=True):
                said |= {
                    name: _rounded(v) if name == "trainer_logprobs" else _shortest(v)
                    for name, v in values.items()
                }
        return line | {"turns": turns}

    def _turn(self, turn: Turn) -> dict[str, Any]:
        said: dict[str, Any] = {
            "messages": [{"role": m.role, "content": m.content} for m in turn.messages],
            "reply": turn.text,
            "finish_reason": turn.completion.finish_reason,
        }
        if turn.observation.reward:
            said["reward"] = turn.observation.reward
        if turn.observation.metrics:
            said["metrics"] = dict(turn.observation.metrics)
        if not self.config.tokens:
            return said
        completion = turn.completion
        return said | {
            "prompt_ids": turn.prompt_ids.tolist(),
            "token_ids": completion.token_ids.tolist(),
            "logprobs": _rounded(completion.logprobs),
            "policy_versions": _shortest(completion.policy_versions),
        }

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        if not self.config.enable:
            return
        texts = [json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines]
        with self._going_on(self.path.name):
            self._write(texts)

    @contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Training needs nothing of it: a full disk is a warning, once until it is written again."""
        try:
            yield
        except OSError as error:
            if not self._fails:
                logger.warning(
                    "%s was not written: %s; training goes on, and what fits later is written",
                    self.path.with_name(name),
                    error.strerror or error,
                )
            self._fails = True
        else:
            self._fails = False

    def _write(self, texts: list[str]) -> None:
        limit = self.config.max_megabytes * 1e6 / 2
        file = WholeLines(self.path)
        size = self.path.stat().st_size if self.path.exists() else 0
        while texts:
            # In ASCII: as many bytes as characters.
            num_fit = sum(end <= limit - size for end in accumulate(map(len, texts)))
            if num_fit:
                with closing(file):
                    file.append("".join(texts[:num_fit]))
                del texts[:num_fit]
            elif size:
                self.path.replace(previous_file(self.path))
                logger.info("%s is full: the oldest rollouts make room", self.path.name)
            else:
                logger.warning("a rollout of %d bytes is too long for %s", len(texts.pop(0)), self.path.name)
            size = self.path.stat().st_size if self.path.exists() else 0


def previous_file(path: Path) -> Path:
    """Where what is older than a rollouts.jsonl lies."""
    return path.with_suffix(f".1{path.suffix}")


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Of the file and the one before it, oldest first; a line that its process did not end is left out."""
    lines = [
        line
        for part in (previous_file(path), path)
        if part.exists()
        for line in part.read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _dropped(step: int, batch: Batch) -> list[list[Entry]]:
    return [_entries(group, step=step, kind="dropped", dropped=why) for why, group in batch.dropped]


def _entries(
    group: Group, trained: Iterable[TrainedRollout] = (), *, number: int = 0, **said: Any
) -> list[Entry]:
    """[G]; `trained` is what is known of the group's scored rollouts, or nothing. `number` is the group's."""
    entries: list[Entry] = []
    of_scored = zip_longest(range(len(group.scored)), trained)
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if failure_of(rollout, score) is not None:
            entries.append(Entry(rollout=rollout, score=score, said=said))
        else:
            place, known = next(of_scored)
            entries.append(
                Entry(rollout=rollout, score=score, said=said, trained=known, place=(number, place))
            )
    return entries


def _first_and_odd(entries_PG: Sequence[list[Entry]], num: int | None) -> Iterator[Entry]:
    """Those of the first groups, and odd ones of the groups after them as far as there is room."""
    num = len(entries_PG) if num is None else num
    yield from chain.from_iterable(entries_PG[:num])
    room = num * max(map(len, entries_PG), default=0)
    yield from islice((e for e in chain.from_iterable(entries_PG[num:]) if e.is_odd), room)


def _shortest(values: np.ndarray) -> list[float] | float:
    """One number where all are the same."""
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _rounded(logprobs: np.ndarray) -> list[float]:
    return [round(float(p), 6) for p in logprobs]


def _plain(value: Any) -> Any:
    """The same in what JSON has; what it has no form for as a text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
