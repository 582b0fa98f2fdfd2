"""Pipeline schedules from a file in PyTorch's format, whose reader and runner are private.

0F0,0F1,0B0,0B1        a row for each rank: stage 0 forward on micro-batch 0, and so on
,1F0,1B0,1F1,1B1       an empty cell waits
"""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

MAX_SCHEDULE_BYTES = 1 << 20
"""Size of the file of a pipeline schedule."""
MAX_CELL = 32
"""Characters of a cell, such as 12F255 or (0F1;1B0)OVERLAP_F_B."""


def _import_schedules() -> Any:
    """Return PyTorch's module of schedules, which imports dynamo: half a second, for few runs."""
    from torch.distributed.pipelining import schedules

    return schedules


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSchedule:
    """A pipeline schedule in PyTorch's format."""

    ranks: tuple[int, ...]
    """Rank of each stage."""
    num_micro_batches: int
    actions: dict[int, list[Any]]
    """What each rank does, in order; None where it waits."""

    def count_held(self, rank: int) -> float:
        """Return for how many micro-batches a rank keeps activations at once."""
        schedules = _import_schedules()
        num_held = most = 0
        for action in self.actions[rank]:
            if action is None:
                continue
            if action.computation_type == schedules.FORWARD:
                num_held += 1
            # The backward of the inputs alone keeps what the backward of the weights needs.
            if action.computation_type in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT):
                num_held -= 1
            most = max(most, num_held)
        return most / self.ranks.count(rank)

    @property
    def splits_backward(self) -> bool:
        """True if some backward of a stage's weights is apart from that of its inputs."""
        schedules = _import_schedules()
        for row in self.actions.values():
            for action in row:
                if action is not None and action.computation_type == schedules.BACKWARD_INPUT:
                    return True
        return False


def _read_rows(file: str) -> list[list[Any]]:
    """Return the actions of each rank, None where a cell is empty.

    Raises:
        ValueError: the file holds something else.
    """
    # Limits first: the file may come with a folder from elsewhere.
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):  # Reading a pipe or a device would not end.
        raise ValueError("is no file")
    if status.st_size > MAX_SCHEDULE_BYTES:
        raise ValueError(f"has {status.st_size} bytes: must have at most {MAX_SCHEDULE_BYTES}")

    schedules, rows = _import_schedules(), []
    with open(file, newline="", encoding="utf-8-sig") as text:
        for row in csv.reader(text):
            for cell in row:
                if len(cell.strip()) > MAX_CELL:
                    raise ValueError(f"has a cell {cell[:20]!r}... of {len(cell)} characters")
            rows.append([schedules._Action.from_str(cell.strip()) for cell in row])
    return rows


def _count(numbers: Iterable[int | None], most: int, what: str) -> int:
    """Return the number of stages or micro-batches; raise ValueError if it exceeds `most`.

    Each of them has an entry, so there are at most as many as entries. PyTorch's check would
    allocate as much as a cell such as 9999999F0 claims.
    """
    count = 1 + max(number or 0 for number in numbers)
    if count > most:
        raise ValueError(f"names {what} {count - 1}: with {most} entries there are at most {most}")
    return count


def read_csv_schedule(file: str, *, num_ranks: int) -> FileSchedule:
    """Read a pipeline schedule and check it; raise ValueError naming the file."""
    field = f"pipeline_parallel_schedule_csv={file!r}"
    schedules = _import_schedules()
    lowered: dict[int, Any] = {}
    try:
        rows = _read_rows(file)
        actions = dict(enumerate(rows))
        entries = [action for action in chain.from_iterable(rows) if action is not None]
        if not entries or len(rows) != num_ranks:
            raise ValueError(f"has {len(rows)} rows: must have one for each of {num_ranks} ranks")
        num_stages = _count((action.stage_index for action in entries), len(entries), "stage")
        num_micro_batches = _count(
            (action.microbatch_index for action in entries), len(entries), "micro-batch"
        )
        if len(set(entries)) < len(entries):
            raise ValueError("an entry is there twice")
        transfers = [action for action in entries if not action.is_compute_op]
        if transfers:
            raise ValueError(
                f"has {transfers[0]}: must have no transfers, which follow from the rest"
            )
        # PyTorch takes the losses of the last stage in this order.
        order = []
        for action in entries:
            is_last = action.stage_index == num_stages - 1
            if is_last and action.computation_type == schedules.FORWARD:
                order.append(action.microbatch_index)
        if order != list(range(num_micro_batches)):
            raise ValueError(
                f"stage {num_stages - 1}, the last, must take the micro-batches forward in order"
            )

        ranks = schedules._validate_schedule(actions, num_ranks, num_stages, num_micro_batches)
        idle = set(range(num_ranks)) - set(ranks.values())
        if idle:
            raise ValueError(f"row {min(idle) + 1} has no entry: every rank must have a stage")
        for rank, row in actions.items():
            unsharded: Any = schedules._add_unshard_reshard(row)
            lowered[rank] = schedules._add_reduce_grad(unsharded, num_micro_batches)
        # Finds actions that wait for each other, which would hang at the first step.
        schedules._add_send_recv(lowered, stage_to_rank=ranks.__getitem__, num_stages=num_stages)
    except (
        OSError, ValueError, RuntimeError, AssertionError, AttributeError, IndexError, KeyError,
        TypeError, csv.Error,
    ) as error:  # fmt: skip
        # PyTorch checks by assertions and look-ups, and some of its messages take many lines.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{field}: {reason[:300]}") from error
    return FileSchedule(
        ranks=tuple(ranks[stage] for stage in range(num_stages)),
        num_micro_batches=num_micro_batches,
        actions=actions,
    )


def make_file_schedule(file: FileSchedule, stages: list[Any], **settings: Any) -> Any:
    """Return the schedule that a file describes; PyTorch has no public class for it."""
    schedule = _import_schedules()._PipelineScheduleRuntime(
        stages, file.num_micro_batches, **settings
    )
    schedule._prepare_schedule_with_comms(file.actions)
    return schedule
