"""The cookbook's recipes, made small enough for two cores, and what is promised of each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.tinker_cookbook.checks import (
    Check,
    Evidence,
    Row,
    completes,
    guesses_are_read,
    kl_stays_low,
    loss_falls,
    old_checkpoints_go,
    read_rows,
    resumes,
    reward_rises,
)
from tools.tinker_cookbook.processes import POLL_S, kill, running
from tools.tinker_cookbook.serving import API_KEY, Server

TIMED_OUT = -1000
"""In place of the status of a process that was ended because its time was over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    """Of its row and folder."""
    module: str
    """In tinker_cookbook.recipes."""
    arguments: Mapping[str, str | int | float]
    checks: tuple[Check, ...]
    killed_after: int | None = None
    """It is killed when it has written that many checkpoints, and started again; None: it is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where recipes run."""

    python: Path
    """Of the cookbook's environment."""
    model: Path
    """The base model's folder, and its name."""
    server: Server
    folder: Path
    """For the recipes' own folders and logs."""
    deadline_s: float
    """Of one recipe."""


OFFLINE = {
    "TINKER_API_KEY": API_KEY,
    "TINKER_TELEMETRY": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
SMALL: Mapping[str, str | int | float] = {"renderer_name": "qwen3_instruct", "eval_every": 0, "save_every": 0}
ARITHMETIC: Mapping[str, str | int | float] = {
    **SMALL,
    "env": "arithmetic",
    "lora_rank": 8,
    "group_size": 8,
    "groups_per_batch": 32,
    "max_tokens": 5,
}


def all_recipes(conversations: Path) -> tuple[Recipe, ...]:
    """
    Args:
        conversations: the cookbook's example data.
    """
    return (
        _math_rl("math_rl", num_steps=20, rise=0.2, learning_rate=1e-3, loss_fn="importance_sampling"),
        _math_rl("math_rl_ppo", num_steps=12, rise=0.1, learning_rate=1e-3, loss_fn="ppo"),
        _math_rl(
            "math_rl_streaming",
            num_steps=12,
            rise=0.1,
            learning_rate=1e-3,
            loss_fn="importance_sampling",
            **{"stream_minibatch_config.groups_per_batch": 32, "stream_minibatch_config.num_minibatches": 4},
        ),
        # What was sampled is up to one step old here, so the logged KL has the policy's own step in it, and
        # the noise of a step's tokens: the step has to be a small one, of many samples.
        _math_rl(
            "math_rl_one_step_off",
            num_steps=56,
            rise=0.06,
            learning_rate=6e-5,
            loss_fn="importance_sampling",
            groups_per_batch=64,
            max_steps_off_policy=1,
        ),
        _chat_sl(conversations),
        Recipe(
            name="guess_number",
            module="multiplayer_rl.guess_number.train",
            arguments={
                **SMALL,
                "learning_rate": 3e-4,
                "batch_size": 2,
                "group_size": 4,
                "max_tokens": 16,
                "max_steps": 4,
            },
            checks=(completes(4), kl_stays_low, guesses_are_read),
        ),
    )


def _math_rl(name: str, *, num_steps: int, rise: float, **arguments: str | int | float) -> Recipe:
    return Recipe(
        name=name,
        module="math_rl.train",
        arguments={**ARITHMETIC, "max_steps": num_steps, **arguments},
        checks=(completes(num_steps), kl_stays_low, reward_rises(by=rise)),
    )


def _chat_sl(conversations: Path) -> Recipe:
    """128 conversations: 8 steps an epoch."""
    num_epochs, batch_size = 4, 16
    return Recipe(
        name="chat_sl",
        module="chat_sl.train",
        arguments={
            **SMALL,
            "dataset": str(conversations),
            "infrequent_eval_every": 0,
            "lora_rank": 8,
            "learning_rate": 3e-3,
            "batch_size": batch_size,
            "num_epochs": num_epochs,
            "max_length": 512,
            "rolling_save_every": 4,
        },
        checks=(completes(8 * num_epochs), loss_falls(to_share=0.8), resumes, old_checkpoints_go),
        killed_after=2,
    )


def run(recipe: Recipe, place: Place) -> Evidence:
    """One recipe to its end, or to its deadline."""
    folder = place.folder / recipe.name
    folder.mkdir(parents=True)
    deadline = time.monotonic() + place.deadline_s
    statuses = []
    if recipe.killed_after is not None:
        statuses.append(_process(recipe, place, number=1, deadline=deadline, kill_after=recipe.killed_after))
    number = len(statuses) + 1
    statuses.append(_process(recipe, place, number=number, deadline=deadline, kill_after=None))
    return Evidence(
        statuses=tuple(statuses),
        rows=read_rows(_run_folder(folder) / "metrics.jsonl"),
        checkpoints=_checkpoints(folder),
        log=_log(folder, number).read_text(encoding="utf-8", errors="replace"),
        kept=tuple(place.server.checkpoints()),
    )


def command(recipe: Recipe, place: Place) -> list[str]:
    """What a user would type; a folder of an earlier process is taken up again."""
    arguments = {
        **recipe.arguments,
        "model_name": place.model,
        "log_path": _run_folder(place.folder / recipe.name),
        "behavior_if_log_dir_exists": "resume",
    }
    module = f"tinker_cookbook.recipes.{recipe.module}"
    return [str(place.python), "-m", module, *(f"{name}={value}" for name, value in arguments.items())]


def _process(recipe: Recipe, place: Place, *, number: int, deadline: float, kill_after: int | None) -> int:
    """Its exit status, as subprocess has it: negative where a signal ended it."""
    folder = place.folder / recipe.name
    environment = {**OFFLINE, "TINKER_BASE_URL": place.server.url}
    log = _log(folder, number)
    with running(command(recipe, place), log=log, cwd=folder, environment=environment) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return TIMED_OUT
            if kill_after is not None and len(_checkpoints(folder)) >= kill_after:
                kill(process)
            time.sleep(POLL_S)
        return process.returncode


def _run_folder(folder: Path) -> Path:
    return folder / "run"


def _log(folder: Path, number: int) -> Path:
    return folder / f"process-{number}.log"


def _checkpoints(folder: Path) -> tuple[Row, ...]:
    return read_rows(_run_folder(folder) / "checkpoints.jsonl")
