"""This process as others watch it: what it does, and its stacks for whoever asks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.activity import STATE_FOLDER, THIS_PROCESS
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.observability.span_file import SPANS_FOLDER, SpanFile, TimelineConfig
from rl.observability.stacks import catch_signal, stop_writing, write_stacks_to
from rl.observability.timeline import NoSpansError, write_timeline

logger = logging.getLogger(__name__)

FAULT_VARIABLE = "RELAY_FAULT"
"""In the environment: where a process is to be killed, see `actors.fault_injection`."""


def be_watched(logs: Path, *, role: str, rank: int, timeline: TimelineConfig | None = None) -> None:
    """From now on logs/state says what this process does, and its stacks can be asked for; logs/spans what it
    has done, as `timeline` says, or its defaults."""
    folder = logs / STATE_FOLDER
    try:
        # First, so that nobody asks who cannot answer.
        write_stacks_to(folder / f"{role}-{rank}.stacks")
        THIS_PROCESS.start(folder, role=role, rank=rank)
    except OSError as error:  # a disk that is full ends no run for this
        logger.warning("%s: what %s-%d does is not told: %s", folder, role, rank, error.strerror or error)
    else:
        _keep_spans(logs / SPANS_FOLDER, role=role, rank=rank, timeline=timeline or TimelineConfig())
    if FAULT_VARIABLE in os.environ:
        from actors.fault_injection import arm

        arm(os.environ[FAULT_VARIABLE], logs=logs)


def _keep_spans(folder: Path, *, role: str, rank: int, timeline: TimelineConfig) -> None:
    file = None
    try:
        if timeline.enable:
            path = folder / f"{role}-{rank}.jsonl"
            file = SpanFile(path, role=role, rank=rank, max_bytes=int(timeline.max_megabytes * 1e6))
    except OSError as error:
        logger.warning("%s: what %s-%d has done is not kept: %s", folder, role, rank, error.strerror or error)
    THIS_PROCESS.keep_spans(file)


def draw_timeline(folder: RunFolder, timeline: TimelineConfig) -> None:
    """Write timeline.json; what goes wrong is logged, as no run ends for it."""
    if not timeline.enable:
        return
    try:
        write_timeline(folder.logs, folder.timeline)
    except NoSpansError as error:
        logger.info("%s was not written: %s", folder.timeline, error)
    except OSError as error:
        logger.warning("%s was not written: %s", folder.timeline, error.strerror or error)
    except Exception as error:  # noqa: BLE001  (the run has its results, or an error of its own to tell of)
        logger.warning("%s was not written: %r", folder.timeline, error)


def forget_earlier_processes(logs: Path) -> None:
    """Of a run that is gone on with: those that are not started again would count as dead."""
    for file in (logs / STATE_FOLDER).glob("*"):
        file.unlink()


@contextmanager
def watched_controller(
    logs: Path, events: Events, *, timeline: TimelineConfig | None = None, resumed_after: int | None = None
) -> Iterator[None]:
    """Within it this process, a run's controller, is watched; how the run began and ended is an event.

    Args:
        timeline: as of `be_watched`.
        resumed_after: the step after which an earlier run is gone on with.
    """
    forget_earlier_processes(logs)
    catch_signal()
    be_watched(logs, role="controller", rank=0, timeline=timeline)
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
        # The record of the last moment stays.
        THIS_PROCESS.stop()
        stop_writing()
