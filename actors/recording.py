"""Recording of one process of a run: its spans, and its stacks on request."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.events import Events
from rl.observability.spans import RECORDER, STATE_FOLDER, TimelineConfig
from rl.observability.stacks import catch_signal, stop_writing_stacks, write_stacks_to

logger = logging.getLogger(__name__)

HOOK_VARIABLE = "RELAY_HOOK"
"""Environment variable that names a module whose `arm(logs)` every process of a run calls: the chaos test's."""


def record_process(logs: Path, *, role: str, rank: int, timeline: TimelineConfig | None = None) -> None:
    """Record the spans of this process in the run's logs, and write its stacks there on request."""
    try:
        # Before the state file, which tells other processes that they may request stacks.
        write_stacks_to(logs, role=role, rank=rank)
        RECORDER.start(logs, role=role, rank=rank, timeline=timeline or TimelineConfig())
    except OSError as error:  # a full disk does not end a run
        logger.warning("%s: %s-%d is not recorded: %s", logs, role, rank, error.strerror or error)
    if HOOK_VARIABLE in os.environ:
        importlib.import_module(os.environ[HOOK_VARIABLE]).arm(logs)


@contextmanager
def record_controller(
    logs: Path, events: Events, *, timeline: TimelineConfig | None = None, resumed_after: int | None = None
) -> Iterator[None]:
    """Record this process as a run's controller, and add the start and the end of the run to its events.

    Args:
        resumed_after: the step after which the run is resumed; None for a new run.
    """
    for file in (logs / STATE_FOLDER).glob("*"):
        file.unlink()  # processes of the earlier attempt would count as dead
    catch_signal()
    record_process(logs, role="controller", rank=0, timeline=timeline)
    if resumed_after is None:
        events.add("started")
    else:
        events.add("resumed", step=resumed_after)
    try:
        yield
        events.add("finished")
    except BaseException as error:
        events.add("stopped", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        RECORDER.stop()  # the state file keeps the last moment
        stop_writing_stacks()
