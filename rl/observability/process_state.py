"""What processes of a run said last that they are doing: the records of `rl.observability.activity`, read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.process_id import ProcessId

_READ_AGAIN = 20
"""Times, where a record is just being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When something was, by two clocks of its machine."""

    since: float
    """The wall clock, in seconds since 1970."""
    since_monotonic_s: float
    """The one that nobody sets; each machine's counts from its own start."""

    def ago_s(self, *, is_here: bool) -> float:
        """Until now; `is_here`: it was on this machine."""
        return max(0.0, time.monotonic() - self.since_monotonic_s if is_here else time.time() - self.since)


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """Something that a process is doing."""

    what: str
    num: int
    """How often at once."""
    version: int | None
    """Policy version of the oldest."""
    since: Moment
    """Of the oldest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """What ended with an error."""

    what: str
    error: str
    """Its class and the beginning of its message."""
    at: Moment


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """What a process said last."""

    role: str
    rank: int
    host: str
    process: ProcessId
    policy_version: int | None
    """That it named last."""
    doing: tuple[Doing, ...]
    """Oldest first; empty where it waits to be asked."""
    idle: Moment
    """Since when, where it does nothing."""
    changed: Moment
    """When something began or ended last."""
    failed: Failed | None
    """The last of its failures: whoever waits for other ranks too has not heard of it."""

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()

    def ago_s(self, moment: Moment) -> float:
        """Seconds from one of its moments until now."""
        return moment.ago_s(is_here=self.is_here)

    def describe(self) -> str:
        """Such as "forward_backward of version 3 for 12.0 s"."""
        doing = self._describe_doing() or f"nothing for {self.ago_s(self.idle):.1f} s"
        if self.failed is None:
            return doing
        ago_s = self.ago_s(self.failed.at)
        return f"{doing}; {self.failed.what} failed {ago_s:.1f} s ago: {self.failed.error}"

    def _describe_doing(self) -> str:
        return ", ".join(
            f"{d.what}{'' if d.num == 1 else f' ({d.num} times)'}"
            f"{'' if d.version is None else f' of version {d.version}'} for {self.ago_s(d.since):.1f} s"
            for d in self.doing
        )


def read_state(file: Path) -> ProcessState:
    """What the process of this file said last.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no record; names the file.
    """
    for _ in range(_READ_AGAIN):
        try:
            record = json.loads(file.read_bytes())
            if record["change"] != record["end"]:
                continue  # Read while it was written.
            return _state(record)
        except (ValueError, KeyError, TypeError):
            continue
    raise ValueError(f"{file} is no record of what a process is doing")


def read_states(folder: Path) -> Iterator[ProcessState]:
    """Of all processes that told it in this folder, by their names; what is no record is left out."""
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError, FileNotFoundError):
            yield read_state(file)


def _state(record: dict[str, Any]) -> ProcessState:
    version = record["policy_version"]
    return ProcessState(
        role=str(record["role"]),
        rank=int(record["rank"]),
        host=str(record["host"]),
        process=ProcessId(int(record["pid"]), int(record["start_ticks"])),
        policy_version=None if version is None else int(version),
        doing=tuple(_doing(entry) for entry in record["doing"]),
        idle=_moment(record["idle"]),
        changed=_moment(record["changed"]),
        failed=None if record["failed"] is None else _failed(record["failed"]),
    )


def _doing(entry: dict[str, Any]) -> Doing:
    oldest = entry["oldest"]
    return Doing(what=entry["what"], num=entry["num"], version=oldest["version"], since=_moment(oldest))


def _failed(told: dict[str, Any]) -> Failed:
    return Failed(what=told["what"], error=told["error"], at=_moment(told["at"]))


def _moment(told: dict[str, Any]) -> Moment:
    return Moment(since=float(told["since"]), since_monotonic_s=float(told["since_monotonic_s"]))
