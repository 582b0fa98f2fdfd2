"""A run's folder, read as it is: finished, under way, killed in the middle of a line, or of an older version.

    run = read_run(Path("outputs/try-1"))
    run.steps[-1]["reward/mean"], run.problems

Nothing in the folder is written and no lock is taken. What cannot be read is said in `problems`, and the rest
is there. Only a folder that is no run's is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from rl.observability.run_folder import EVENTS, ROLLOUTS, STATUS, read_status
from rl.observability.span_file import SPANS_FOLDER
from rl.observability.spans import Span, read_spans

CONFIG, METRICS, LOGS = "config.json", "metrics.jsonl", "logs"
TOKENS_MB = 48.0
"""Rollout files up to this size are kept whole; of larger ones the tokens are thinned out."""
TOKEN_FIELDS = ("prompt_ids", "token_ids", "logprobs", "trainer_logprobs", "advantages", "mask")
"""Of a turn: what `recorder.tokens` False leaves out too. Versions stay, they are mostly one number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunData:
    """What a run has left so far."""

    folder: Path
    status: Literal["running", "finished"] | None
    """running also of a run that was killed; None where the run's version did not tell."""
    config: dict[str, Any]
    """config.json: `module`, `config` (the function's name) and `values`; empty where it cannot be read."""
    steps: list[dict[str, float]]
    """A record a step, by step; a number that is not finite is a float nan or inf."""
    evaluations: list[dict[str, float]]
    """The same of evaluations."""
    rollouts: list[dict[str, Any]]
    """Lines of rollouts.jsonl and the file before it, oldest first (`rl.observability.recorder`)."""
    events: list[dict[str, Any]]
    spans: list[Span]
    problems: list[str]
    """What could not be read, or is not there in an older run: a sentence each."""

    @property
    def went_back(self) -> list[dict[str, Any]]:
        """Events of a run that lost its trainer; a process that goes on with a run begins with one too."""
        found = []
        resumes = False
        for event in self.events:
            if event["event"] == "went_back" and not resumes:
                found.append(event)
            resumes = event["event"] == "resumed" or (resumes and event["event"] != "went_back")
        return found

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the config by its dotted path, such as `loop.max_policy_age`."""
        value: Any = self.config.get("values")
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return default
            value = value[name]
        return value


def read_run(folder: str | Path, *, tokens_mb: float = TOKENS_MB) -> RunData:
    """All that is in a run's folder.

    Args:
        tokens_mb: of more megabytes of rollouts, the tokens are kept of every second, third ... step alone,
            so that what is in memory stays bounded; texts and rewards are kept of all.

    Raises:
        ValueError: there is no such folder, or it is not a run's.
    """
    folder = Path(folder)
    _check(folder)
    problems: list[str] = []
    steps, evaluations = _records(folder, problems)
    rollouts = _rollouts(folder, problems, tokens_mb=tokens_mb)
    return RunData(
        folder=folder,
        status=read_status(folder) if (folder / STATUS).exists() else None,
        config=_config(folder, problems),
        steps=steps,
        evaluations=evaluations,
        rollouts=rollouts,
        events=_lines(folder / EVENTS, problems, _event),
        spans=_spans(folder / LOGS, problems),
        problems=[*problems, *_older(folder, steps, rollouts)],
    )


def _check(folder: Path) -> None:
    if not folder.exists():
        raise ValueError(
            f"{folder}: there is no such folder; give the folder of a run, such as outputs/<name>"
        )
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder of a run, such as outputs/<name>")
    of_run = (STATUS, METRICS, CONFIG)
    if not any((folder / name).is_file() for name in of_run):
        inner = sorted(p.name for p in folder.iterdir() if any((p / name).is_file() for name in of_run))
        hint = f"; runs in it: {', '.join(inner[:5])}" if inner else ""
        raise ValueError(f"{folder} is not the folder of a run: it has none of {', '.join(of_run)}{hint}")


def _config(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{CONFIG} is not there: the settings of the run are not known")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{CONFIG} cannot be read: {_why(error)}")
        return {}
    if not isinstance(config, dict) or not isinstance(config.get("values"), dict):
        problems.append(f"{CONFIG} has no values: it is of another version, or no run's")
        return {k: v for k, v in config.items() if k != "values"} if isinstance(config, dict) else {}
    return config


def _records(folder: Path, problems: list[str]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Steps and evaluations, by step. Of two records of one step the later counts: it was done again."""
    by_step: tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]] = ({}, {})
    twice = 0
    for record in _lines(folder / METRICS, problems, _record):
        step, is_evaluation = int(record["step"]), any(name.startswith("eval/") for name in record)
        twice += step in by_step[is_evaluation]
        by_step[is_evaluation][step] = record
    if twice:
        problems.append(f"{METRICS} has {twice} records of steps that come again later: the later ones count")
    if not (folder / METRICS).exists():
        problems.append(f"{METRICS} is not there: no step is done, or it was removed")
    steps, evaluations = ([of[step] for step in sorted(of)] for of in by_step)
    return steps, evaluations


def _rollouts(folder: Path, problems: list[str], *, tokens_mb: float) -> list[dict[str, Any]]:
    files = [folder / name for name in reversed(ROLLOUTS) if (folder / name).exists()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    keep_every = max(1, math.ceil(megabytes / tokens_mb))
    if keep_every > 1:
        problems.append(
            f"rollouts have {megabytes:.0f} MB: their tokens are shown of one in {keep_every} recorded steps"
        )
    numbers: dict[int, int] = {}

    def take(said: dict[str, Any]) -> dict[str, Any] | None:
        if not _is_rollout(said):
            return None
        said = _without_nulls(said) | {"turns": [_without_nulls(turn) for turn in said["turns"]]}
        number = numbers.setdefault(said["step"], len(numbers))
        return said if number % keep_every == 0 else _without_tokens(said)

    return [rollout for file in files for rollout in _lines(file, problems, take)]


def _is_rollout(said: dict[str, Any]) -> bool:
    turns = said.get("turns")
    return (
        isinstance(said.get("step"), int)
        and isinstance(said.get("kind"), str)
        and _fits(said, _OF_ROLLOUT)
        and isinstance(turns, list)
        and all(isinstance(turn, dict) and _fits(turn, _OF_TURN) for turn in turns)
    )


def _without_nulls(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value is not None}


def _fits(said: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], bool]]) -> bool:
    return all(is_one(said[name]) for name, is_one in kinds.items() if said.get(name) is not None)


def _is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _all_are(*kinds: type) -> Callable[[Any], bool]:
    """A list of these alone."""
    return lambda value: isinstance(value, list) and set(map(type, value)) <= {*kinds}


_NUMBERS = (int, float, str, NoneType)
"""In a list of them: one that is not finite is a text."""
_OF_ROLLOUT: dict[str, Callable[[Any], bool]] = {
    "problem": _is_a(str, int),
    "sample": _is_a(int),
    "reward": _is_a(int, float, str),
    "correct": _is_a(bool),
    "parts": lambda value: isinstance(value, dict) and None not in map(_number, value.values()),
}
_OF_TURN: dict[str, Callable[[Any], bool]] = {
    "messages": _all_are(dict),
    "reply": _is_a(str),
    "prompt_ids": lambda value: _all_are(int)(value) and min(value, default=0) >= 0,
    "token_ids": lambda value: _all_are(int)(value) and min(value, default=0) >= 0,
    "logprobs": _all_are(*_NUMBERS),
    "trainer_logprobs": _all_are(*_NUMBERS),
    "policy_versions": lambda value: isinstance(value, int) or _all_are(int)(value),
    "metrics": _is_a(dict),
}
"""What is used of a line, and is not looked at again; anything of it may be missing, or null."""


def _without_tokens(rollout: dict[str, Any]) -> dict[str, Any]:
    turns = [{k: v for k, v in turn.items() if k not in TOKEN_FIELDS} for turn in rollout["turns"]]
    return rollout | {"turns": turns}


def _spans(logs: Path, problems: list[str]) -> list[Span]:
    try:
        return read_spans(logs)
    except OSError as error:
        problems.append(f"{LOGS}/spans cannot be read: {_why(error)}")
        return []


Take = Callable[[dict[str, Any]], dict[str, Any] | None]
"""What is kept of a line's object; None where it is no record of its file."""


def _lines(file: Path, problems: list[str], take: Take) -> list[dict[str, Any]]:
    """What `take` keeps of a file of JSON lines; lines that are no record are counted and said."""
    found: list[dict[str, Any]] = []
    broken: list[int] = []
    cut_short = False
    try:
        with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                kept = _taken(line, take)
                if kept is not None:
                    found.append(kept)
                elif not line.endswith("\n"):
                    cut_short = True
                elif line.strip():
                    broken.append(number)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{file.name} cannot be read to its end: {_why(error)}")
    if cut_short:
        problems.append(f"{file.name}: its last line is cut short and left out; the rest is shown")
    if len(broken) == 1:
        problems.append(f"{file.name}: line {broken[0]} is no record and left out; the rest is shown")
    elif broken:
        problems.append(
            f"{file.name}: {len(broken)} lines, the first of them line {broken[0]}, are no records and left "
            "out; the rest is shown"
        )
    return found


def _taken(line: str, take: Take) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return take(said) if isinstance(said, dict) else None


def _record(said: dict[str, Any]) -> dict[str, Any] | None:
    """A line of metrics.jsonl with its numbers alone; None without a step."""
    record = {name: number for name, value in said.items() if (number := _number(value)) is not None}
    return record if math.isfinite(record.get("step", math.nan)) else None


def _event(said: dict[str, Any]) -> dict[str, Any] | None:
    return said if isinstance(said.get("event"), str) else None


def _older(folder: Path, steps: list[dict[str, float]], rollouts: list[dict[str, Any]]) -> list[str]:
    """What is written of every run of actors by this version, and is not of this one."""
    missing = []
    if not (folder / STATUS).exists():
        missing.append(f"{STATUS} is not there: whether the run finished is not known")
    if steps and not (folder / EVENTS).exists():
        missing.append(f"{EVENTS} is not there: nothing is known of losses and recoveries")
    if steps and not (folder / LOGS / SPANS_FOLDER).is_dir():
        missing.append(f"{LOGS}/{SPANS_FOLDER} is not there: there is no timeline")
    trained = [turn for r in rollouts if "advantage" in r for turn in r["turns"] if "logprobs" in turn]
    if trained and not any("trainer_logprobs" in turn for turn in trained):
        missing.append("rollouts have no logprobs of the trainer: what differs is not known token by token")
    return [f"an older format: {what}" for what in missing]


def _number(value: object) -> float | None:
    """As metrics.jsonl has it: one that is not finite is a text there. None of anything else."""
    if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
        try:
            return float(value)
        except OverflowError:  # of an integer that is no number of ours
            return None
    return None


def _why(error: Exception) -> str:
    return (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "") or str(error)
