"""Run data without a run: records and rollouts as the reader returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.reporting.data import RunData

SOUND: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/correct": 0.5,
    "reward/equal_groups": 0.2,
    "reward/num_failed": 0,
    "completion/tokens_mean": 20.0,
    "completion/cut_off": 0.0,
    "loss/mean": 0.01,
    "loss/entropy_mean": 0.5,
    "loss/grad_norm": 0.1,
    "loss/lr": 1e-5,
    "logprob_diff/mean": 1e-6,
    "age/mean": 0.0,
    "time/step_s": 10.0,
}
"""Metrics of a step of a healthy run."""


def run_data(
    num_steps: int = 30,
    *,
    rollouts: Iterable[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    loop: Mapping[str, Any] | None = None,
    **by_step: Callable[[int], float | None],
) -> RunData:
    """Return steps 1 to `num_steps`; a keyword such as `reward__mean` is a function from the step to that
    metric or None."""
    steps = []
    for step in range(1, num_steps + 1):
        record: dict[str, float] = {"step": step, "policy_version": step, "sync/version": step, **SOUND}
        for name, value_of in by_step.items():
            value = value_of(step)
            record.pop(name.replace("__", "/"), None)
            if value is not None:
                record[name.replace("__", "/")] = value
        steps.append(record)
    return RunData(
        folder=Path("outputs/made-up"),
        status="finished",
        config={"values": {"loop": dict(loop or {})}},
        steps=steps,
        rollouts=list(rollouts),
        events=list(events),
    )


def rollout(
    step: int,
    text: str,
    *,
    problem: str = "p",
    sample: int = 0,
    reward: float = 0.0,
    correct: bool = False,
    answer: str = "",
    version: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a line of rollouts.jsonl with one token for each character of the text."""
    turn = {
        "messages": [],
        "reply": text,
        "finish_reason": "stop",
        "token_ids": list(range(len(text))),
        "policy_versions": step - 1 if version is None else version,
    }
    return {
        "step": step,
        "kind": "train",
        "problem": problem,
        "answer": answer,
        "sample": sample,
        "reward": reward,
        "correct": correct,
        "parts": {},
        "turns": [turn],
    } | more
