"""What the model wrote, on disk: rollouts.jsonl, one JSON object a rollout, of bounded size.

    {"step": 3, "kind": "train", "problem": "sum-digits/47-82", "sample": 0, "reward": 1.0, "correct": true,
     "parts": {"answer": 1.0}, "advantage": 0.5, "end": "done", "turns": [{"messages": [...], "reply": "...",
     "prompt_ids": [...], "token_ids": [...], "logprobs": [...], "policy_versions": [...]}]}

`kind` is train, dropped (with the reason why its group was), eval (greedy) or eval_sampled (with the set).
Logprobs are the generator's, in nats; advantages are one number, or one a token where they differ.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.rollouts.evaluation import EvaluationResult
from rl.rollouts.producer import Batch
from rl.types import Rollout, Score, Turn

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RecorderConfig:
    """Which rollouts are written to rollouts.jsonl."""

    enable: bool = True
    """Write any."""
    num_groups: int = 2
    """Groups of each step that are written, the first ones. Rollouts that failed, or in which no answer was
    found, are written of every group, up to as many rollouts."""
    num_eval_problems: int = 32
    """Problems of each evaluation set that are written."""
    tokens: bool = True
    """Token ids, logprobs and policy versions too."""
    max_megabytes: float = 256.0
    """Of the file and the one before it, rollouts.1.jsonl, together: the oldest rollouts make room."""

    def __post_init__(self) -> None:
        if self.num_groups < 0 or self.num_eval_problems < 0:
            raise ValueError(
                f"num_groups={self.num_groups}, num_eval_problems={self.num_eval_problems}: must be at "
                "least 0"
            )
        if not 0 < self.max_megabytes < math.inf:
            raise ValueError(f"max_megabytes={self.max_megabytes}: must be above 0 and finite")


class Recorder:
    """Appends lines; when the file has half of what it may, it takes the place of the one before."""

    def __init__(self, path: Path, *, config: RecorderConfig) -> None:
        self.path = path
        self.config = config

    def step(self, step: int, batch: Batch, advantages_PG: Sequence[Sequence[np.ndarray]]) -> None:
        """Of a step's groups, in order, and of those that were dropped before it."""
        self._append(self._of_step(step, batch, advantages_PG))

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Of each set's problems, in order."""
        self._append(self._of_evaluation(step, result))

    def _of_step(
        self, step: int, batch: Batch, advantages_PG: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[dict[str, Any]]:
        room_for_odd = self.config.num_groups * max((len(g.rollouts) for g in batch.groups), default=0)
        for place, (group, advantages) in enumerate(zip(batch.groups, advantages_PG, strict=True)):
            of_scored = iter(advantages)
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                advantage = None if score.failure is not None else next(of_scored)
                is_odd = score.failure is not None or bool(score.unparsed)
                if place < self.config.num_groups or (is_odd and room_for_odd > 0):
                    room_for_odd -= place >= self.config.num_groups
                    line = self._line(rollout, score, step=step, kind="train")
                    yield line if advantage is None else line | {"advantage": _shortest(advantage)}
        for reason, group in batch.dropped[: self.config.num_groups]:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                yield self._line(rollout, score, step=step, kind="dropped") | {"dropped": reason}

    def _of_evaluation(self, step: int, result: EvaluationResult) -> Iterator[dict[str, Any]]:
        for done in result.sets:
            of_set = {"set": done.name}
            for rollout, score in done.greedy[: self.config.num_eval_problems]:
                yield self._line(rollout, score, step=step, kind="eval") | of_set
            for group in done.sampled[: self.config.num_eval_problems]:
                for rollout, score in group:
                    yield self._line(rollout, score, step=step, kind="eval_sampled") | of_set

    def _line(self, rollout: Rollout, score: Score, *, step: int, kind: str) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": step,
            "kind": kind,
            "problem": rollout.prompt.problem.id,
            "answer": rollout.prompt.problem.answer,
            "sample": rollout.sample,
            "reward": score.reward,
            "correct": score.correct,
            "parts": dict(score.parts),
            "end": rollout.end,
        }
        if score.failure is not None:
            line["failure"] = score.failure
        if score.unparsed:
            line["unparsed"] = list(score.unparsed)
        return line | {"turns": [self._turn(turn) for turn in rollout.turns]}

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
            "logprobs": [round(float(p), 6) for p in completion.logprobs],
            "policy_versions": _shortest(completion.policy_versions),
        }

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        if not self.config.enable:
            return
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        if not text:
            return
        limit = self.config.max_megabytes * 1e6 / 2
        if self.path.exists() and self.path.stat().st_size + len(text) > limit:
            self.path.replace(previous_file(self.path))
            logger.info("%s is full: what was in %s is gone", self.path.name, previous_file(self.path).name)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


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


def _shortest(values: np.ndarray) -> list[float] | float:
    """One number where all are the same."""
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers
