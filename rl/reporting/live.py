"""Findings of a run while it goes on: the same rules, over what its files have so far.

    find_now = follow_run(Path("outputs/try-1"))
    find_now()  # {"replies_cut_off": "Replies are cut off. Since step 1 100% of the replies ..."}

Each call reads only what was added since the last one. Memory is bounded: of a long run the first
and the latest steps are kept, and the latest rollouts, without their tokens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rl.observability.events import is_event
from rl.observability.metrics import read_record
from rl.observability.run_folder import CONFIG, EVENTS, METRICS, ROLLOUTS
from rl.reporting.data import RunData, drop_tokens, is_evaluation, read_optional, read_rollout
from rl.reporting.evidence import Finding
from rl.reporting.findings import find
from rl.utils.files import open_regular, parse_json

MAX_BYTES = 16_000_000
"""Most bytes of a file that one call reads: the latest."""
MAX_ROLLOUTS = 2000
MAX_CHARACTERS = 16_000_000
"""Most characters of the kept rollouts."""
KINDS_READ = frozenset({"train", "dropped", "pending"})
"""Kinds of rollouts that rules look at."""
NUM_FIRST_STEPS, NUM_LAST_STEPS = 200, 1800
"""Kept steps of a run, between which others are dropped."""

FindNow = Callable[[], dict[str, str]]
"""Function that returns a text for each kind of finding."""


class GrowingFile:
    """JSON-lines file of which each call reads the new lines only."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the lines since the last call; an unfinished line waits."""
        for line in self._read_text().split("\n"):
            with suppress(ValueError):
                value = parse_json(line)
                if isinstance(value, dict):
                    yield value

    def _read_text(self) -> str:
        try:
            file = open_regular(self._path)
        except OSError:
            return ""  # There is none yet.
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode:
                # The file was full, and another has taken its place.
                self._inode, self._offset = state.st_ino, 0
            start = max(self._offset, state.st_size - self._max_bytes)
            file.seek(start)
            data = file.read(state.st_size - start)
        if start > self._offset:
            # The first line of what is read has lost its beginning.
            data = data[data.find(b"\n") + 1 :]
        end = data.rfind(b"\n") + 1
        self._offset = state.st_size - (len(data) - end)
        return data[:end].decode("utf-8", errors="replace")


class RunFollower:
    """Reader of a run's folder during the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = GrowingFile(folder / METRICS)
        self._rollouts = GrowingFile(folder / ROLLOUTS[0])
        self._events_file = GrowingFile(folder / EVENTS)
        self._config = read_optional(folder / CONFIG)
        self._steps: list[dict[str, float]] = []
        self._evaluations: deque[dict[str, float]] = deque(maxlen=NUM_LAST_STEPS)
        self._lines: deque[dict[str, Any]] = deque()
        self._num_characters = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_LAST_STEPS)

    def read(self) -> RunData:
        """Return what the rules look at, up to the last finished step."""
        for line in self._metrics.read():
            record = read_record(line)
            if record is None:
                continue
            if is_evaluation(record):
                self._evaluations.append(record)
            else:
                self._steps.append(record)
        if len(self._steps) > NUM_FIRST_STEPS + NUM_LAST_STEPS:
            del self._steps[NUM_FIRST_STEPS:-NUM_LAST_STEPS]

        for line in self._rollouts.read():
            rollout = read_rollout(line)
            # No rule reads the replies of an evaluation, unless their reward failed.
            if rollout is not None and (rollout["kind"] in KINDS_READ or "failure" in rollout):
                self._keep(drop_tokens(rollout))
        self._events += (event for event in self._events_file.read() if is_event(event))
        return RunData(
            folder=self._folder,
            status="running",
            config=self._config if isinstance(self._config.get("values"), dict) else {},
            steps=list(self._steps),
            evaluations=list(self._evaluations),
            rollouts=list(self._lines),
            events=list(self._events),
        )

    def _keep(self, rollout: dict[str, Any]) -> None:
        self._lines.append(rollout)
        self._num_characters += _count_characters(rollout)
        while len(self._lines) > MAX_ROLLOUTS or self._num_characters > MAX_CHARACTERS:
            self._num_characters -= _count_characters(self._lines.popleft())


def _count_characters(rollout: dict[str, Any]) -> int:
    num = 0
    for turn in rollout["turns"]:
        num += len(str(turn.get("reply", "")))
        for message in turn.get("messages", ()):
            num += len(str(message.get("content", "")))
    return num


def follow_run(folder: Path) -> FindNow:
    """Return the function that finds what looks wrong in a run up to now."""
    return partial(_find_now, RunFollower(folder))


def _find_now(follower: RunFollower) -> dict[str, str]:
    texts: dict[str, str] = {}
    for finding in find(follower.read()):
        texts.setdefault(finding.kind, describe(finding))
    return texts


def describe(finding: Finding) -> str:
    """Return a finding as a line: title, cause with figures, and advice."""
    return f"{finding.title}. {finding.sentence} {finding.advice}"
