"""This process as others watch it: what it does, and its stacks for whoever asks."""

from __future__ import annotations

import os
from pathlib import Path

from rl.observability.activity import STATE_FOLDER, THIS_PROCESS
from rl.observability.stacks import stop_writing, write_stacks_to

FAULT_VARIABLE = "RELAY_FAULT"
"""In the environment: where a process is to be killed, see `actors.fault_injection`."""


def be_watched(logs: Path, *, role: str, rank: int) -> None:
    """From now on logs/state says what this process does, and its stacks can be asked for."""
    folder = logs / STATE_FOLDER
    # First, so that nobody asks who cannot answer.
    write_stacks_to(folder / f"{role}-{rank}.stacks")
    THIS_PROCESS.start(folder, role=role, rank=rank)
    if FAULT_VARIABLE in os.environ:
        from actors.fault_injection import arm

        arm(os.environ[FAULT_VARIABLE], logs=logs)


def forget_earlier_processes(logs: Path) -> None:
    """Of a run that is gone on with: those that are not started again would count as dead."""
    for file in (logs / STATE_FOLDER).glob("*"):
        file.unlink()


def stop_being_watched() -> None:
    """The record of the last moment stays."""
    THIS_PROCESS.stop()
    stop_writing()
