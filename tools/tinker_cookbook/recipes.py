"""The cookbook's recipes, scaled down to two CPU cores, with the promises that each run must
keep.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Value = str | int | float

REWARD, NLL = "env/all/reward/total", "train_mean_nll"
KL_NAMES = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
"""Means over sampled tokens of d and of d^2 / 2, with d the sampler's logprob minus the trainer's.
"""
MAX_KL, MAX_KL_BFLOAT16 = 1e-3, 1e-1
FINAL = "final"
"""Name of a run's last checkpoint."""
WINDOW = 3
"""Steps averaged at each end of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion with its prompt, as numbers that can be compared."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything that a run left behind."""

    statuses: tuple[int, ...]
    """Exit status of each process; the last process was to finish the run."""
    rows: tuple[Row, ...]
    """Rows of metrics.jsonl."""
    checkpoints: tuple[Row, ...]
    """Rows of checkpoints.jsonl."""
    log: str
    """Output of the last process."""
    captured: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """Rows that the capture proxy's exporter wrote, by kind: sample, train_op."""
    served: tuple[Sample, ...] = ()
    """Completions that the server sampled meanwhile."""

    @property
    def steps(self) -> list[Row]:
        """Rows of training steps, without those of a whole run's totals."""
        return [row for row in self.rows if REWARD in row or NLL in row]

    def ends(self, name: str) -> tuple[float, float]:
        """Return the means of the first and the last steps; NaN if there are too few."""
        found = [float(row[name]) for row in self.rows if row.get(name) is not None]
        if len(found) < 2 * WINDOW:
            return math.nan, math.nan
        return statistics.fmean(found[:WINDOW]), statistics.fmean(found[-WINDOW:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    promise: str
    holds: bool
    seen: str


Check = Callable[[Evidence], Finding]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    program: tuple[str, ...]
    """Arguments of the cookbook's interpreter: a module of the cookbook, or a file."""
    arguments: Mapping[str, Value]
    checks: tuple[Check, ...]
    kill_after: int | None = None
    """Checkpoints after which the run is killed and started again; None leaves it alone."""


def run_module(name: str) -> tuple[str, ...]:
    """Return the program of a module within tinker_cookbook.recipes."""
    return ("-m", f"tinker_cookbook.recipes.{name}")


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return the complete lines of a JSONL file; none if the file is missing."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else ()
    return tuple(json.loads(line) for line in lines if line.strip())


# Promises


def completes(num_steps: int) -> Check:
    """Check that the run exits with 0, has each step once and in order, and one final
    checkpoint.
    """

    def check(evidence: Evidence) -> Finding:
        steps = [row["step"] for row in evidence.steps]
        finals = [row for row in evidence.checkpoints if row["name"] == FINAL]
        return Finding(
            promise=f"completes {num_steps} steps",
            holds=evidence.statuses[-1] == 0
            and steps == list(range(num_steps))
            and len(finals) == 1,
            seen=f"status {evidence.statuses[-1]}, {len(set(steps))} different steps in "
            f"{len(steps)} rows, {len(finals)} final checkpoints",
        )

    return check


def kl_stays_below(limit: float) -> Check:
    """Check both estimates in every step; a step without one counts as NaN and fails."""

    def check(evidence: Evidence) -> Finding:
        found = [abs(float(row.get(name, math.nan))) for name in KL_NAMES for row in evidence.steps]
        return Finding(
            promise=f"KL of sampler and trainer below {limit:g} in every step",
            holds=bool(found) and all(value < limit for value in found),
            seen=f"at most {max(found, default=math.nan):.1e}",
        )

    return check


def reward_rises(*, by: float) -> Check:
    def check(evidence: Evidence) -> Finding:
        first, last = evidence.ends(REWARD)
        seen = f"{first:.3f} -> {last:.3f}"
        return Finding(promise=f"reward rises by {by:g}", holds=last - first >= by, seen=seen)

    return check


def loss_falls(*, to_share: float) -> Check:
    def check(evidence: Evidence) -> Finding:
        first, last = evidence.ends(NLL)
        seen = f"{first:.3f} -> {last:.3f} nats a token"
        return Finding(
            promise=f"loss falls to {to_share:.0%}", holds=last <= to_share * first, seen=seen
        )

    return check


def resumes(evidence: Evidence) -> Finding:
    """Check that the first process was killed and the last one began at a checkpoint."""
    paths = [row["state_path"] for row in evidence.checkpoints if row["name"] != FINAL]
    taken = [path for path in paths if f"Resumed training from {path}" in evidence.log]
    return Finding(
        promise="killed, it resumes from its last checkpoint",
        holds=evidence.statuses[:-1] == (-signal.SIGKILL,) and len(taken) == 1,
        seen=(
            f"statuses {', '.join(map(str, evidence.statuses))}, resumed from "
            f"{', '.join(taken) or 'nothing'}"
        ),
    )


# Recipes

SMALL: Mapping[str, Value] = {"renderer_name": "qwen3_instruct", "eval_every": 0, "save_every": 0}


def smollm2_recipes() -> tuple[Recipe, ...]:
    """Return the recipe of SmolLM2-135M-Instruct.

    Without its system message the model adds better as a plain dialogue than in its chat template.
    """
    recipe = _math_rl(
        "math_rl",
        num_steps=20,
        rise=0.1,
        max_kl=MAX_KL_BFLOAT16,
        renderer_name="role_colon",
        groups_per_batch=32,
        lora_rank=16,
        learning_rate=2e-4,
        max_tokens=8,
    )
    return (recipe,)


def all_recipes(conversations: Path) -> tuple[Recipe, ...]:
    """Return the recipes of the tiny model; `conversations` is the cookbook's example data."""
    streaming = {
        "stream_minibatch_config.groups_per_batch": 32,
        "stream_minibatch_config.num_minibatches": 4,
    }
    # Samples may be one step old here, so the logged KL includes the policy's own step and the
    # noise of a step's tokens: small steps of many samples keep it low.
    off_policy: dict[str, Value] = {
        "learning_rate": 6e-5,
        "groups_per_batch": 64,
        "max_steps_off_policy": 1,
    }
    chat: dict[str, Value] = {
        "dataset": str(conversations),
        "infrequent_eval_every": 0,
        "lora_rank": 8,
        "learning_rate": 3e-3,
        "batch_size": 16,  # of 128 conversations: 8 steps an epoch
        "num_epochs": 4,
        "max_length": 512,
        "rolling_save_every": 4,
    }
    guess: dict[str, Value] = {
        "learning_rate": 3e-4,
        "batch_size": 2,
        "group_size": 4,
        "max_tokens": 16,
        "max_steps": 4,
    }
    return (
        _math_rl("math_rl", num_steps=20, rise=0.2),
        _math_rl("math_rl_ppo", num_steps=12, rise=0.1, loss_fn="ppo"),
        _math_rl("math_rl_streaming", num_steps=12, rise=0.1, **streaming),
        _math_rl("math_rl_one_step_off", num_steps=56, rise=0.06, **off_policy),
        Recipe(
            name="chat_sl",
            program=run_module("chat_sl.train"),
            arguments={**SMALL, **chat},
            checks=(completes(32), loss_falls(to_share=0.8), resumes),
            kill_after=2,
        ),
        Recipe(
            name="guess_number",
            program=run_module("multiplayer_rl.guess_number.train"),
            arguments={**SMALL, **guess},
            checks=(completes(4), kl_stays_below(MAX_KL)),
        ),
    )


def _math_rl(
    name: str, *, num_steps: int, rise: float, max_kl: Value = MAX_KL, **arguments: Value
) -> Recipe:
    whole: dict[str, Value] = {
        **SMALL,
        "env": "arithmetic",
        "lora_rank": 8,
        "group_size": 8,
        "groups_per_batch": 32,
        "max_tokens": 5,
        "loss_fn": "importance_sampling",
        "learning_rate": 1e-3,
        "max_steps": num_steps,
    }
    checks = (completes(num_steps), kl_stays_below(float(max_kl)), reward_rises(by=rise))
    return Recipe(
        name=name,
        program=run_module("math_rl.train"),
        arguments=whole | arguments,
        checks=checks,
    )


def chosen(recipes: Sequence[Recipe], names: Sequence[str]) -> list[Recipe]:
    """Return the named recipes, or all if there are no names; raise ValueError for an unknown
    name.
    """
    valid = [recipe.name for recipe in recipes]
    for name in names:
        if name not in valid:
            raise ValueError(f"--only {name}: must be one of {', '.join(valid)}")
    return [recipe for recipe in recipes if not names or recipe.name in names]
