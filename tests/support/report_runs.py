"""Synthetic runs, whose numbers are made up.

`make_run` writes a folder of any length and content, with the files that runs write, line for line.
`run_data` and `rollout` return what the reader of a report would.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.reporting.data import RunData

START_S = 1_764_000_000.0
"""Wall-clock time at the start of the runs."""
STEP_S = 2.0
TEXT = "4+7=11 11+8=19 19+2=21 [ANSWER] 21"
PROMPT = "47 82"
HACK = "?? [ANSWER] 99"


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """Contents of a made-up run's folder."""

    num_steps: int = 40
    samples: int = 4
    tokens: int = 0
    """Tokens of each reply; 0 means as many as the text has characters."""
    reply: str = TEXT
    seed: int = 0
    status: str = "finished"
    spans_a_step: int = 8
    """Approximate number of spans of each process."""
    is_new: bool = True
    """Write the fields of newer versions: the trainer's logprobs, spans, limits, the environment.
    """
    events: tuple[Mapping[str, Any], ...] = ()
    lr: float = 4e-5
    hacked_from: int | None = None
    """First step in which every reply is `HACK`, which is wrong but earns the full reward."""


def make_run(folder: Path, made: MadeRun) -> Path:
    """Write a run's folder and return its path."""
    rng = np.random.default_rng(made.seed)
    (folder / "logs").mkdir(parents=True)
    _write_lines(folder / "metrics.jsonl", _metrics(made, rng))
    _write_lines(folder / "rollouts.jsonl", _rollouts(made, rng))
    started = {"time": START_S, "event": "started"}
    ended = [{"time": START_S + STEP_S * made.num_steps, "event": "finished"}]
    events = [started, *made.events, *(ended if made.status == "finished" else [])]
    _write_lines(folder / "events.jsonl", events)
    (folder / "status.json").write_text(json.dumps({"status": made.status}))
    (folder / "config.json").write_text(json.dumps(_config(folder.name, made)))
    if made.is_new:
        (folder / "environment.json").write_text(
            json.dumps(
                {
                    "host": "node-1",
                    "python": "3.11.9",
                    "num_cpus": 2,
                    "packages": {"torch": "2.13.0"},
                }
            )
        )
        _write_spans(folder / "logs" / "spans", made)
    return folder


def unpack(block: str) -> Any:
    """Return the value of a packed block of a page."""
    return json.loads(gzip.decompress(base64.b64decode(block)))


def _config(name: str, made: MadeRun) -> dict[str, Any]:
    values = {
        "name": name,
        "description": "Qwen3 of 0.8M parameters, made up for a test",
        "model": "qwen3/tiny",
        "hf_assets_path": None,
        "loop": {"num_steps": made.num_steps, "max_off_policy_steps": 0},
        # With them the report's advice is as long as that of a run on two cores.
        "trainer": {"optimizer": {"lr": made.lr}, "num_threads": 2},
        "generator": {"num_threads": 2},
    }
    return {"module": "no_such_module", "config": "tiny", "values": values}


def _metrics(made: MadeRun, rng: np.random.Generator) -> Iterable[dict[str, Any]]:
    for step in range(made.num_steps + 1):
        learnt = 1 / (1 + math.exp(-8 * (step / max(1, made.num_steps) - 0.4)))
        if step % max(1, made.num_steps // 8) == 0:
            correct = 0.35 + 0.62 * learnt
            yield {"step": step, "policy_version": step, "eval/correct": correct,
                "eval/num_problems": 512,
                   "time/eval_s": 0.8}  # fmt: skip
        if step:
            yield _step(step, learnt, made, rng)


def _step(step: int, learnt: float, made: MadeRun, rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(0, 1, 8)
    generate_s, train_s = 1.1 + 0.05 * noise[0], 0.8 + 0.03 * noise[1]
    step_s = generate_s + train_s + 0.1
    told = {
        "step": step, "policy_version": step,
        "reward/mean": 0.3 + 0.6 * learnt + 0.03 * noise[2],
        "reward/std": 0.4,
        "reward/correct": 0.3 + 0.65 * learnt + 0.03 * noise[3],
        "reward/equal_groups": 0.4,
        "completion/tokens_mean": 22 + 4 * learnt + 0.3 * noise[4],
        "completion/cut_off": 0.0,
        "loss/mean": -0.02 + 0.003 * noise[5], "loss/ratio_mean": 1.0, "loss/clipped_fraction": 0.0,
        "loss/entropy_mean": 0.4 - 0.2 * learnt + 0.01 * noise[6],
        "loss/grad_norm": abs(0.1 + 0.03 * noise[7]), "loss/lr": made.lr,
        "logprob_diff/mean": 1e-4, "logprob_diff/max": 2e-3 + 1e-4 * noise[0],
        "logprob_diff/identical": 0,
        "staleness/mean": 0.0, "staleness/max": 0,
        "time/generate_s": generate_s, "time/score_s": 0.02, "time/train_s": train_s,
        "time/publish_s": 0.08, "time/push_s": 0.05, "time/pull_s": 0.03, "time/step_s": step_s,
        "time/generator_idle_s": step_s - generate_s, "time/trainer_idle_s": step_s - train_s,
        "perf/samples_per_s": 128.0,
        "perf/generated_tokens_per_s": 2900.0, "perf/trained_tokens_per_s": 5200.0,
    }  # fmt: skip
    if made.is_new:
        told |= {"limit/decode": 0.31, "limit/train": 0.62, "limit/sync": 0.8, "limit/idle": 0.42}
    return told


def _rollouts(made: MadeRun, rng: np.random.Generator) -> Iterable[dict[str, Any]]:
    for step in range(1, made.num_steps + 1):
        for sample in range(made.samples):
            yield _rollout(step, sample, made, rng)


def _rollout(step: int, sample: int, made: MadeRun, rng: np.random.Generator) -> dict[str, Any]:
    hacks = made.hacked_from is not None and step >= made.hacked_from
    ids = list((HACK if hacks else made.reply).encode())
    if made.tokens:
        ids = rng.integers(32, 127, made.tokens).tolist()
    logprobs = np.log(rng.uniform(0.2, 1, len(ids)))
    right = bool(rng.random() < step / made.num_steps)
    line = rollout(
        step, bytes(ids).decode(), problem=f"sum-digits/{step}-0", sample=sample, answer="21",
        reward=1.0 if right or hacks else 0.1, correct=right and not hacks,
        parts={"answer": float(right), "format": 1.0}, advantage=0.5 if right else -0.5, end="done",
    )  # fmt: skip
    (turn,) = line["turns"]
    turn |= {
        "messages": [{"role": "user", "content": PROMPT}],
        "prompt_ids": [257, *b"user\n", *PROMPT.encode(), 258, *b"\n", 257, *b"assistant\n"],
        "token_ids": [*ids, 258],
        "logprobs": [*(round(float(p), 6) for p in logprobs), -0.0001],
    }
    if made.is_new:
        drift = rng.normal(0, 3e-3, len(ids) + 1).tolist()
        turn["trainer_logprobs"] = [
            round(min(0.0, p + d), 6) for p, d in zip(turn["logprobs"], drift, strict=True)
        ]
        turn["mask"] = [*[1] * len(ids), 0]
    return line


_ACTIVITIES = {
    "trainer-0": (
        ("forward_backward", 0.56, 0.85),
        ("optim_step", 0.86, 0.9),
        ("push", 0.91, 0.95),
    ),
    "generator-0": (
        ("pull", 0.95, 0.99),
        *(("generate", 0.02 + 0.01 * i, 0.5 + 0.005 * i) for i in range(6)),
    ),
    "reward-0": (("score", 0.51, 0.54),),
    "controller-0": (
        ("waits for a batch", 0.01, 0.54),
        ("waits for trainer.forward_backward", 0.55, 0.86),
    ),
}
"""Start and end of each activity, as fractions of a step."""


def _write_spans(folder: Path, made: MadeRun) -> None:
    folder.mkdir()
    for process, activities in _ACTIVITIES.items():
        role, _, _ = process.rpartition("-")
        _write_lines(folder / f"{process}.jsonl", _spans(role, activities, made))


def _spans(role: str, activities: Iterable[Any], made: MadeRun) -> Iterable[dict[str, Any]]:
    for step in range(made.num_steps):
        start_s = START_S + STEP_S * step
        for _ in range(max(1, made.spans_a_step // 8)):
            for name, first, last in activities:
                yield _event(name, start_s + STEP_S * first, STEP_S * (last - first), version=step)
        if role == "controller":
            yield _event(f"step {step + 1}", start_s, STEP_S)


def _event(name: str, start_s: float, duration_s: float, **args: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start_s * 1e6, "dur": duration_s * 1e6, "args": args}


def _write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")


# Data without a folder

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
    "staleness/mean": 0.0,
    "time/step_s": 10.0,
}
"""Metrics of a step of a healthy run."""


def run_data(
    num_steps: int = 30,
    *,
    rollouts: Iterable[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    loop: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    **by_step: Callable[[int], float | None],
) -> RunData:
    """Return steps 1 to `num_steps`; a keyword such as `reward__mean` is a function from the step
    to that metric or None. `values` are those of the config besides `loop`."""
    steps = []
    for step in range(1, num_steps + 1):
        record: dict[str, float] = {
            "step": step,
            "policy_version": step,
            "sync/version": step,
            **SOUND,
        }
        for name, value_of in by_step.items():
            value = value_of(step)
            record.pop(name.replace("__", "/"), None)
            if value is not None:
                record[name.replace("__", "/")] = value
        steps.append(record)
    return RunData(
        folder=Path("outputs/made-up"),
        status="finished",
        config={"values": {"loop": dict(loop or {}), **(values or {})}},
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
        "step": step, "kind": "train", "problem": problem, "answer": answer, "sample": sample,
        "reward": reward, "correct": correct, "parts": {}, "turns": [turn],
    } | more  # fmt: skip
