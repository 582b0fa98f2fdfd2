"""A process of a run that is killed at a chosen moment, to see that the run gets over it.

    RELAY_FAULT="phase=push,count=2,victim=generator,delay_s=0.05" python -m rl.train ...

The process in which `phase` (a name of `rl.observability.activity.doing`) begins for the count-th time kills
the victim, after the delay: once in a run, however often it goes on or is resumed. Of several processes of
the victim's role the one that is in the phase itself, else the last. Imported only where the variable is set.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from actors.processes import ProcessId, identify, with_descendants
from rl.observability.activity import STATE_FOLDER, THIS_PROCESS
from rl.observability.process_state import ProcessState, read_states
from rl.process_id import kill, parent_of

VICTIMS = ("trainer", "generator", "reward", "host", "controller")
"""host: that of the last generator, with all that runs on it; where hosts are simulated."""
MARKER = "fault.json"
"""In a run's logs: what was done, and when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    phase: str
    """What begins, such as "forward_backward"."""
    victim: str
    """One of `VICTIMS`."""
    count: int = 1
    """Of the phase, in one process."""
    delay_s: float = 0.0
    """From the beginning of the phase."""

    def __post_init__(self) -> None:
        if self.victim not in VICTIMS:
            raise ValueError(f"victim={self.victim!r}: must be one of {', '.join(VICTIMS)}")
        if self.count < 1 or not self.delay_s >= 0:
            raise ValueError(
                f"count={self.count}, delay_s={self.delay_s}: must be at least 1, and at least 0"
            )

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse_fault(text: str) -> Fault:
    """From what the variable holds.

    Raises:
        ValueError: names what is unknown, missing or of no valid value.
    """
    kinds = {"phase": str, "victim": str, "count": int, "delay_s": float}
    given = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := given.keys() - kinds.keys():
        raise ValueError(f"{text!r}: no {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    if missing := {"phase", "victim"} - given.keys():
        raise ValueError(f"{text!r}: {', '.join(sorted(missing))} is missing")
    values = {}
    for name, value in given.items():
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: must be a number") from None
    return Fault(**values)


def arm(text: str, *, logs: Path) -> None:
    """In every process of the run: from now on the phase is waited for."""
    THIS_PROCESS.on_begin = _Trigger(parse_fault(text), logs=logs)


class _Trigger:
    def __init__(self, fault: Fault, *, logs: Path) -> None:
        self._fault = fault
        self._logs = logs
        self._lock = threading.Lock()
        self._num_begun = 0

    def __call__(self, phase: str) -> None:
        if phase != self._fault.phase:
            return
        with self._lock:
            self._num_begun += 1
            is_due = self._num_begun == self._fault.count
        if not is_due or (self._logs / MARKER).exists():
            return
        if self._fault.delay_s:
            timer = threading.Timer(self._fault.delay_s, self._strike)
            timer.daemon = True
            timer.start()
        else:
            self._strike()

    def _strike(self) -> None:
        victims = _victims(self._fault.victim, list(read_states(self._logs / STATE_FOLDER)))
        told = {
            "fault": str(self._fault),
            "pids": [process.pid for process in victims],
            "time": time.time(),
        }
        try:
            with (self._logs / MARKER).open("x") as marker:
                json.dump(told, marker)
                marker.flush()
                os.fsync(marker.fileno())  # This process may be the victim.
        except FileExistsError:
            return  # Another process was as far.
        for process in victims:
            kill(process)


def _victims(victim: str, states: Iterable[ProcessState]) -> list[ProcessId]:
    role = "generator" if victim == "host" else victim
    candidates = [s.process for s in states if s.role == role or s.role.startswith(f"{role}_")]
    if not candidates:
        raise RuntimeError(f"fault injection: the run has no process of role {role!r}")
    own = identify(os.getpid())
    chosen = own if own in candidates else candidates[-1]
    assert chosen is not None
    if victim != "host":
        return [chosen]
    host = parent_of(chosen.pid)
    assert host is not None
    if any(s.role == "controller" and s.process == host for s in states):
        raise RuntimeError("fault injection: victim=host needs launch.hosts='process'")
    # The host first: it must not see its processes die.
    return with_descendants([host])
