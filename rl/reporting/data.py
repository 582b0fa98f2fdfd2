"""Everything that a run has left in its folder: finished, running, killed, of an older version, or
from elsewhere.

    run = read_run(Path("outputs/try-1"))
    run.steps[-1]["reward/mean"], run.problems

Nothing in the folder is written, locked or run. What cannot be read is named in `problems`, and the
rest is returned. Only a folder that is not a run's, or has links, devices or pipes in place of
files, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.config.json import value_at
from rl.observability.events import is_event
from rl.observability.metrics import parse_number, read_record
from rl.observability.run_folder import (
    CONFIG,
    DEFAULTS,
    ENVIRONMENT,
    EVENTS,
    LOGS,
    METRICS,
    ROLLOUTS,
    STATUS,
    read_status,
    refuse_special_files,
)
from rl.observability.spans import SPANS_FOLDER
from rl.observability.timeline import Span, read_spans
from rl.utils.files import json_lines, parse_json, read_json_object, read_regular

EXPECTED = {
    METRICS: "no step is done, or the file was removed",
    STATUS: "whether the run finished is unknown",
    EVENTS: "losses and recoveries are unknown",
    f"{LOGS}/{SPANS_FOLDER}": "there is no timeline",
}
"""Files of every run, and what is unknown without them, as in runs of older versions."""
TOKENS_MB = 48.0
"""Size of rollout files above which the tokens of some steps are dropped."""
MAX_TOKEN_ID = 2**32 - 1
TOKEN_FIELDS = ("prompt_ids", "token_ids", "logprobs", "trainer_logprobs", "advantages", "mask")
"""Fields of a turn with one entry a token, without versions, which are mostly one number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunData:
    """Contents of a run's folder."""

    folder: Path
    status: Literal["running", "finished"] | None
    """`running` includes runs that were killed; None for a version without the status file."""
    config: dict[str, Any]
    """config.json: `module`, `config` (the function's name) and `values`; empty if unreadable."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values that the config function had when the run started; empty for a version without the
    file.
    """
    environment: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    """Records of steps, by step."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Records of evaluations, by step."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of rollouts.jsonl and of the file before it, oldest first
    (`rl.observability.recorder`).
    """
    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Sentences about files that are missing or unreadable."""

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted path, such as `loop.max_off_policy_steps`."""
        return value_at(self.config.get("values", {}), path, default)

    def number(self, path: str, default: float) -> float:
        """Return a value of the config that is a number, or else the default."""
        value = self.setting(path)
        return value if isinstance(value, int | float) and math.isfinite(value) else default


def read_run(folder: str | Path, *, tokens_mb: float = TOKENS_MB) -> RunData:
    """Read a run's folder; raises ValueError if it is missing, or is not a run's.

    Beyond `tokens_mb` megabytes of rollouts the tokens of only every second, third, ... step are
    kept, to bound memory; texts and rewards are always kept.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: there is no such folder; give the folder of a run, such as outputs/<name>"
        )
    refuse_special_files(folder)
    of_run = (STATUS, METRICS, CONFIG)
    if not any((folder / name).is_file() for name in of_run):
        raise ValueError(f"{folder} is not the folder of a run: it has none of {', '.join(of_run)}")
    problems = [
        f"{name} is missing: {what}"
        for name, what in EXPECTED.items()
        if not (folder / name).exists()
    ]
    steps, evaluations = _records(folder, problems)
    return RunData(
        folder=folder,
        status=read_status(folder),
        config=_config(folder, problems),
        defaults=read_optional(folder / DEFAULTS),
        environment=read_optional(folder / ENVIRONMENT),
        steps=steps,
        evaluations=evaluations,
        rollouts=_rollouts(folder, problems, tokens_mb=tokens_mb),
        events=_lines(folder / EVENTS, problems, lambda line: line if is_event(line) else None),
        spans=_spans(folder / LOGS, problems),
        problems=problems,
    )


def _config(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = parse_json(read_regular(folder / CONFIG))
        if isinstance(config["values"], dict):
            return dict(config)
        problems.append(f"{CONFIG} has no values")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(
            f"{CONFIG} cannot be read, so the settings of the run are unknown: {error!r}"
        )
    return {}


def _records(
    folder: Path, problems: list[str]
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return steps and evaluations by step; the later of two records of a step counts."""
    by_step: tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]] = ({}, {})
    for record in _lines(folder / METRICS, problems, read_record):
        is_evaluation = any(name.startswith("eval/") for name in record)
        by_step[is_evaluation][int(record["step"])] = record
    steps, evaluations = ([of[step] for step in sorted(of)] for of in by_step)
    return steps, evaluations


def _rollouts(folder: Path, problems: list[str], *, tokens_mb: float) -> list[dict[str, Any]]:
    files = [folder / name for name in reversed(ROLLOUTS) if (folder / name).exists()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    keep_every = max(1, math.ceil(megabytes / tokens_mb))
    if keep_every > 1:
        problems.append(
            f"rollouts have {megabytes:.0f} MB: their tokens are shown of one in {keep_every} "
            "recorded steps"
        )
    numbers: dict[int, int] = {}

    def take(line: dict[str, Any]) -> dict[str, Any] | None:
        line = {name: value for name, value in line.items() if value is not None}
        if not _is_rollout(line):
            return None
        dropped = (
            TOKEN_FIELDS if numbers.setdefault(line["step"], len(numbers)) % keep_every else ()
        )
        line["turns"] = [
            {name: v for name, v in turn.items() if v is not None and name not in dropped}
            for turn in line["turns"]
        ]
        return line

    return [rollout for file in files for rollout in _lines(file, problems, take)]


def _is_rollout(line: dict[str, Any]) -> bool:
    """Return whether the fields that the report computes with have the types of
    `rl.observability.recorder`.
    """
    parts = line.get("parts", {})
    return (
        isinstance(line.get("step"), int)
        and isinstance(line.get("kind"), str)
        and isinstance(line.get("sample", 0), int)
        and all(
            isinstance(line.get(name), str | int | float | None) for name in ("problem", "correct")
        )
        and isinstance(parts, dict)
        and parse_number(parts.get("overlong", 0.0)) is not None
        and isinstance(line.get("turns"), list)
        and all(isinstance(turn, dict) and _is_turn(turn) for turn in line["turns"])
    )


def _is_turn(turn: dict[str, Any]) -> bool:
    lists = ("messages", "prompt_ids", "token_ids", "logprobs", "trainer_logprobs")
    if not all(isinstance(turn.get(name), list | None) for name in lists):
        return False
    versions = turn.get("policy_versions", 0)
    ids = [*(turn.get("prompt_ids") or ()), *(turn.get("token_ids") or ())]
    return (
        all(isinstance(message, dict) for message in turn.get("messages") or ())
        and all(
            isinstance(version, int)
            for version in (versions if isinstance(versions, list) else [versions])
        )
        and all(isinstance(token_id, int) and 0 <= token_id <= MAX_TOKEN_ID for token_id in ids)
    )


def _spans(logs: Path, problems: list[str]) -> list[Span]:
    try:
        return read_spans(logs)
    except OSError as error:
        problems.append(f"{LOGS}/{SPANS_FOLDER} cannot be read: {error}")
        return []


Take = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Function that returns what is kept of a line, or None if the line is not a record of its file."""


def _lines(file: Path, problems: list[str], take: Take) -> list[dict[str, Any]]:
    """Return what `take` keeps of a JSON-lines file, and add the number of damaged lines to the
    problems.
    """
    found: list[dict[str, Any]] = []
    broken: list[int] = []
    try:
        for number, line in json_lines(file):
            kept = None if line is None else take(line)
            if kept is None:
                broken.append(number)
            else:
                found.append(kept)
    except OSError as error:
        problems.append(f"{file.name} cannot be read to its end: {error}")
    if broken:
        problems.append(
            f"{file.name}: {len(broken)} damaged lines are skipped, the first of them line "
            f"{broken[0]}; the rest is shown"
        )
    return found


def read_optional(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or nothing if the file is missing or damaged."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return {}
