"""A process of a run that is killed at a chosen moment, to see that the run recovers.

    export RELAY_HOOK=tools.fault_injection
    RELAY_FAULT='{"phase": "push", "count": 2, "victim": "generator", "delay_s": 0.05}' python -m
    rl.train ...

The process in which `phase` (a name of `rl.observability.spans.span`) begins for the count-th time
kills the victim, after the delay: once in a run, however often it goes on or is resumed. Of several
processes of the victim's role the victim is the one that is in the phase itself, else the last. A
JSON list holds several faults.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from actors.launch.cleanup import list_with_descendants
from actors.launch.member import HOOK_VARIABLE
from rl.observability.spans import RECORDER, ProcessState, read_states
from rl.utils.processes import ProcessId, identify, kill

VICTIMS = ("trainer", "generator", "reward", "host", "controller")
"""host: that of the last generator, with all that runs on it; where hosts are simulated."""
FAULT_VARIABLE = "RELAY_FAULT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    phase: str
    """Name of the span whose start triggers the fault, such as "forward_backward"."""
    victim: str
    """One of `VICTIMS`."""
    count: int = 1
    """Number of the phase's start in one process, from 1."""
    delay_s: float = 0.0
    """Delay after the start of the phase, in seconds."""

    def marker(self, logs: Path) -> Path:
        """Return the file in a run's logs that records the fault and its time."""
        return logs / f"fault-{self.phase}-{self.victim}.json"


def environment(*faults: Fault) -> dict[str, str]:
    """Return the variables with which a run injects the faults."""
    return {
        HOOK_VARIABLE: __name__,
        FAULT_VARIABLE: json.dumps([asdict(fault) for fault in faults]),
    }


def arm(logs: Path) -> None:
    """Wait for the phases in this process and inject each fault when its phase starts."""
    faults = json.loads(os.environ[FAULT_VARIABLE])
    triggers = [
        _Trigger(Fault(**f), logs=logs) for f in (faults if isinstance(faults, list) else [faults])
    ]

    def on_begin(phase: str) -> None:
        for trigger in triggers:
            trigger(phase)

    RECORDER.on_begin = on_begin


class _Trigger:
    def __init__(self, fault: Fault, *, logs: Path) -> None:
        self._fault = fault
        self._marker = fault.marker(logs)
        self._logs = logs
        self._lock = threading.Lock()
        self._num_begun = 0

    def __call__(self, phase: str) -> None:
        if phase != self._fault.phase:
            return
        with self._lock:
            self._num_begun += 1
            is_due = self._num_begun == self._fault.count
        if not is_due or self._marker.exists():
            return
        if self._fault.delay_s:
            timer = threading.Timer(self._fault.delay_s, self._strike)
            timer.daemon = True
            timer.start()
        else:
            self._strike()

    def _strike(self) -> None:
        victims = _victims(self._fault.victim, list(read_states(self._logs)))
        if not victims:
            return  # They ended meanwhile, or have not started.
        told = {
            "fault": asdict(self._fault),
            "pids": [process.pid for process in victims],
            "time": time.time(),
        }
        try:
            with self._marker.open("x") as marker:
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
        return []  # At the start it may come later: its own phase strikes it then.
    own = identify(os.getpid())
    chosen = own if own in candidates else candidates[-1]
    assert chosen is not None
    if victim != "host":
        return [chosen]
    host = None
    with suppress(psutil.NoSuchProcess):
        host = identify(psutil.Process(chosen.pid).ppid())
    if host is None:
        return []
    if any(s.role == "controller" and s.process == host for s in states):
        raise RuntimeError("fault injection: victim=host needs launch.hosts='process'")
    # The host first: it must not see its processes die.
    return list_with_descendants([host])
