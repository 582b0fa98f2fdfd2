"""Contents of a run's folder: of a finished, running, killed, older or foreign run.

    run = read_run(Path("outputs/try-1"))
    run.steps[-1]["reward/mean"], run.problems

Nothing in the folder is written, locked or run. What cannot be read is named in `problems`, and the
rest is returned. Only a folder that is not a run's, or has links, devices or pipes in place of
files, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.config.json import get_value_at
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
from rl.reporting.ledger import add_ledger
from rl.utils.files import parse_json, read_json_lines, read_json_object, read_regular

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
    """Values that the config function had when the run started; empty without the file."""
    environment: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    """Records of steps, by step."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Records of evaluations, by step."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of rollouts.jsonl and of the file before it, oldest first: `rl.observability.recorder`.
    With what the run's ledger has of them, if there is one: `rl.reporting.ledger`."""
    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Sentences about files that are missing or unreadable."""

    def get_setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted path, such as `loop.max_off_policy_steps`."""
        return get_value_at(self.config.get("values", {}), path, default)

    @property
    def has_chat_template(self) -> bool:
        """True if the run has recorded that its tokenizer has a chat template."""
        return any(event.get("chat_template") is True for event in self.events)

    def get_number(self, path: str, default: float) -> float:
        """Return a value of the config that is a number, or else the default."""
        value = self.get_setting(path)
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
    # Before anything is opened: to read a pipe would never end.
    refuse_special_files(folder)
    needed = (STATUS, METRICS, CONFIG)
    if not any((folder / name).is_file() for name in needed):
        raise ValueError(f"{folder} is not the folder of a run: it has none of {', '.join(needed)}")

    problems = []
    for name, unknown in EXPECTED.items():
        if not (folder / name).exists():
            problems.append(f"{name} is missing: {unknown}")
    steps, evaluations = _read_records(folder, problems)
    rollouts = _read_rollouts(folder, problems, tokens_mb=tokens_mb)
    add_ledger(rollouts, folder, problems)
    return RunData(
        folder=folder,
        status=read_status(folder),
        config=_read_config(folder, problems),
        defaults=read_optional(folder / DEFAULTS),
        environment=read_optional(folder / ENVIRONMENT),
        steps=steps,
        evaluations=evaluations,
        rollouts=rollouts,
        events=_read_lines(
            folder / EVENTS, problems, lambda line: line if is_event(line) else None
        ),
        spans=_read_spans(folder / LOGS, problems),
        problems=problems,
    )


def _read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
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


def _read_records(
    folder: Path, problems: list[str]
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return steps and evaluations by step; the later of two records of a step counts."""
    steps: dict[int, dict[str, float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for record in _read_lines(folder / METRICS, problems, read_record):
        # A run that went back to a checkpoint writes its steps again.
        (evaluations if is_evaluation(record) else steps)[int(record["step"])] = record
    return _sort_by_step(steps), _sort_by_step(evaluations)


def is_evaluation(record: Mapping[str, float]) -> bool:
    """Return whether a record of metrics.jsonl is of an evaluation, and not of a step."""
    return any(name.startswith("eval/") for name in record)


def _sort_by_step(records: dict[int, dict[str, float]]) -> list[dict[str, float]]:
    return [records[step] for step in sorted(records)]


def _read_rollouts(folder: Path, problems: list[str], *, tokens_mb: float) -> list[dict[str, Any]]:
    # The current file comes last: the other one holds what was recorded before it grew too long.
    files = [folder / name for name in reversed(ROLLOUTS) if (folder / name).exists()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    # Whole steps keep or lose their tokens, so that a group stays comparable.
    keep_every = max(1, math.ceil(megabytes / tokens_mb))
    if keep_every > 1:
        problems.append(
            f"rollouts have {megabytes:.0f} MB: their tokens are shown of one in {keep_every} "
            "recorded steps"
        )
    numbers: dict[int, int] = {}
    """Number of each recorded step, in the order of the files."""

    def take(line: dict[str, Any]) -> dict[str, Any] | None:
        rollout = read_rollout(line)
        if rollout is None:
            return None
        number = numbers.setdefault(rollout["step"], len(numbers))
        return rollout if number % keep_every == 0 else drop_tokens(rollout)

    rollouts = []
    for file in files:
        rollouts += _read_lines(file, problems, take)
    return rollouts


def read_rollout(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a line of rollouts.jsonl that have a value; None for another line."""
    rollout = _drop_none(line)
    if not _is_rollout(rollout):
        return None
    rollout["turns"] = [_drop_none(turn) for turn in rollout["turns"]]
    return rollout


def drop_tokens(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the rollout with texts and rewards only."""
    turns = [_drop_none(turn, drop=TOKEN_FIELDS) for turn in rollout["turns"]]
    return {**rollout, "turns": turns}


def _drop_none(fields: dict[str, Any], *, drop: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that have a value, without those of some names."""
    kept = {}
    for name, value in fields.items():
        if value is not None and name not in drop:
            kept[name] = value
    return kept


def _is_rollout(line: dict[str, Any]) -> bool:
    """Return whether the fields that the report computes with have the recorder's types."""
    parts = line.get("parts", {})
    turns = line.get("turns")
    return (
        isinstance(line.get("step"), int)
        and isinstance(line.get("kind"), str)
        and isinstance(line.get("sample", 0), int)
        and isinstance(line.get("problem"), str | int | float | None)
        and isinstance(line.get("correct"), str | int | float | None)
        and isinstance(parts, dict)
        and parse_number(parts.get("overlong", 0.0)) is not None
        and isinstance(turns, list)
        and all(isinstance(turn, dict) and _is_turn(turn) for turn in turns)
        and _are_branches(line.get("branches"), num_turns=len(turns))
    )


def _are_branches(branches: Any, *, num_turns: int) -> bool:
    """Return whether these are the recorder's branches; linear rollouts and old files have none."""
    if branches is None:
        return True
    if not isinstance(branches, list) or not branches:
        return False
    for branch in branches:
        turns = branch.get("turns") if isinstance(branch, dict) else None
        if not isinstance(turns, list) or not turns:
            return False
        if not all(isinstance(turn, int) and 0 <= turn < num_turns for turn in turns):
            return False
    return True


def find_last_turn(rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the turn that ended the rollout's last main branch; None for a line without turns."""
    turns: list[dict[str, Any]] = rollout["turns"]
    branches = rollout.get("branches") or ()
    ends = [branch["turns"][-1] for branch in branches if branch.get("role") == "main"]
    if ends:
        return turns[max(ends)]
    if branches:
        return turns[branches[-1]["turns"][-1]]
    return turns[-1] if turns else None


def _is_turn(turn: dict[str, Any]) -> bool:
    for name in ("messages", "prompt_ids", "token_ids", "logprobs", "trainer_logprobs"):
        if not isinstance(turn.get(name), list | None):
            return False
    messages = turn.get("messages") or ()
    versions = turn.get("policy_versions", 0)
    # A single version stands for all tokens of a turn.
    versions = versions if isinstance(versions, list) else [versions]
    # The browser computes with these as unsigned integers.
    ids = [*(turn.get("prompt_ids") or ()), *(turn.get("token_ids") or ())]
    return (
        all(isinstance(message, dict) for message in messages)
        and all(isinstance(version, int) for version in versions)
        and all(isinstance(token_id, int) and 0 <= token_id <= MAX_TOKEN_ID for token_id in ids)
    )


def _read_spans(logs: Path, problems: list[str]) -> list[Span]:
    try:
        return read_spans(logs)
    except OSError as error:
        problems.append(f"{LOGS}/{SPANS_FOLDER} cannot be read: {error}")
        return []


Take = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Function that returns what is kept of a line, or None if the line is not a record of its file."""


def _read_lines(file: Path, problems: list[str], take: Take) -> list[dict[str, Any]]:
    """Return what `take` keeps of a JSON-lines file; damaged lines are counted in the problems."""
    records: list[dict[str, Any]] = []
    damaged: list[int] = []
    try:
        for number, line in read_json_lines(file):
            record = None if line is None else take(line)
            if record is None:
                damaged.append(number)
            else:
                records.append(record)
    except OSError as error:
        # What was read until then is shown: half of a report is better than none.
        problems.append(f"{file.name} cannot be read to its end: {error}")
    if damaged:
        problems.append(
            f"{file.name}: {len(damaged)} damaged lines are skipped, the first of them line "
            f"{damaged[0]}; the rest is shown"
        )
    return records


def read_optional(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or nothing if the file is missing or damaged."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return {}
