"""This process as Monarch's client: how it is settled, and by what its processes are known."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator

import monarch.actor
from monarch.actor import MeshFailure

RUN = uuid.uuid4().hex
"""In the environment, as RELAY_RUN, of every process that this controller starts."""
RUN_VARIABLE = "RELAY_RUN"


def settle_monarch(on_fault: Callable[[MeshFailure], None]) -> None:
    """Keep Monarch from interrupting the controller when an actor dies, and from editing log records.

    Its default ends the main thread by KeyboardInterrupt. Whoever waits for that actor gets an
    error anyway, and every wait has a deadline, so the controller can decide.
    """
    monarch.actor.unhandled_fault_hook = on_fault
    monarch.actor.config.prefix_python_logs_with_actor = False  # our lines name role and rank


def quiet_jobs() -> None:
    """Drop what Monarch's jobs say below a warning; their modules set a level when they are imported."""
    for name in ("job", "slurm", "kubernetes"):
        logging.getLogger(f"monarch._src.job.{name}").setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet_client_start() -> Iterator[None]:
    """Drop the line that Monarch writes to stderr when its client starts, and only then."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
