"""Runs that something is done to, each in processes of its own, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.processes import carrying_environment, kill
from actors.watching import FAULT_VARIABLE
from tools.chaos.cases import Case

ROOT = Path(__file__).resolve().parent.parent.parent
OWNER = "RELAY_CHAOS"
"""In the environment of every process of a run, whoever started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended, with the one that went on with it if it was resumed."""

    statuses: tuple[int, ...]
    """Exit statuses; negative: the signal."""
    run_s: float
    timed_out: bool


def undisturbed(folder: Path, *, config: str, limit_s: float) -> Ended:
    """The run that others are compared with."""
    started = time.monotonic()
    status = _run(_start(folder, config), log=folder.with_suffix(".log"), environment={}, limit_s=limit_s)
    return _ended([status], started)


def struck(case: Case, folder: Path, *, config: str, limit_s: float) -> Ended:
    """The case's run; where its controller is what was killed, it is resumed."""
    started = time.monotonic()
    log = folder.with_suffix(".log")
    environment = {FAULT_VARIABLE: str(case.fault)}
    command = [*_start(folder, config), *case.options]
    statuses = [_run(command, log=log, environment=environment, limit_s=limit_s)]
    if statuses[0] == -signal.SIGKILL and case.fault.victim == "controller":
        resume = [sys.executable, "-m", "rl.train", "--resume", str(folder)]
        statuses.append(_run(resume, log=log, environment=environment, limit_s=limit_s))
    return _ended(statuses, started)


def _start(folder: Path, config: str) -> list[str]:
    run = [sys.executable, "-m", "rl.train", "--module", "tools.chaos.configs", "--config", config]
    return [*run, "--dump_folder", str(folder.parent), "--name", folder.name, "--overwrite", "true"]


def _ended(statuses: Sequence[int | None], started: float) -> Ended:
    return Ended(
        statuses=tuple(status for status in statuses if status is not None),
        run_s=time.monotonic() - started,
        timed_out=None in statuses,
    )


def _run(command: Sequence[str], *, log: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Its exit status, None if it had not ended in time; nothing of it is left."""
    owner = {OWNER: f"{os.getpid()}-{log.stem}"}
    with log.open("a") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment | owner,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return run.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
        for process in carrying_environment(OWNER, owner[OWNER]):
            kill(process)
