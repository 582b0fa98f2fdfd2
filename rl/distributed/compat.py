"""Private parts of PyTorch that relay uses, each with its reason. Checked with PyTorch 2.11 and
2.13.
"""

from __future__ import annotations

import csv
import os
import pickle
import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, default_pg_timeout
from torch.distributed.pipelining import schedules
from torch.nn.utils.stateless import _reparametrize_module


@cache
def use_one_gloo_worker() -> None:
    """Give every gloo group created from now on one worker thread, because two corrupt the heap.

    PyTorch 2.13 runs a group's collectives on two threads. At the end of a collective each thread
    assigns the collective's name to a string that both share, without a lock
    (`lastCompletedWorkName`, in `ProcessGroupGloo::runLoop`). A name of more than 15 characters, as
    of DTensor's all-gather, lives on the heap: two threads free it at once, and the process dies at
    a later allocation. All-gathers and sums of 4 numbers, 32 in flight at a time, crash within 0.2
    s.

    With one thread a group's collectives run in the order in which they were started, which has to
    be the same on all ranks anyway; it is no slower. PyTorch accepts options of groups from its
    callers, but none of gloo's, so the constructor is replaced.
    """
    make = ProcessGroupGloo.__init__

    def make_with_one(
        group: ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        timeout: Any = default_pg_timeout,
    ) -> None:
        # PyTorch also passes an options object in place of the timeout.
        options = _gloo_options(timeout) if isinstance(timeout, timedelta) else timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_one  # type: ignore[method-assign, assignment]


def _gloo_options(timeout: timedelta) -> Any:
    """Return PyTorch's own defaults with one thread instead of two per device."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        options._devices = [
            ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")
        ]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return options


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the deadline of a group's later collectives; PyTorch has no public call for it."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the flight recorder's entries, oldest first; PyTorch has no public reader."""
    bindings = torch._C._distributed_c10d
    name = "_dump_nccl_trace" if "nccl" in dist.get_backend_config() else "_dump_fr_trace"
    dump = getattr(bindings, name, None)
    return [] if dump is None else pickle.loads(dump()).get("entries", [])


def replaced_parameters(
    module: nn.Module, tensors: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """Put tensors in place of parameters; the public `functional_call` would call the module's
    hooks too.
    """
    return _reparametrize_module(module, tensors)


def enable_micro_pipeline(group: dist.ProcessGroup) -> None:
    """Let the compiler overlap this group's collectives with matrix products; only private switches
    exist.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSchedule:
    """A pipeline schedule in PyTorch's format."""

    ranks: tuple[int, ...]
    """Rank of each stage."""
    num_micro_batches: int
    actions: dict[int, list[Any]]
    """What each rank does, in order; None where it waits."""

    def held_at_once(self, rank: int) -> float:
        """Return for how many micro-batches a rank keeps activations at once."""
        held = most = 0
        for action in self.actions[rank]:
            if action is not None:
                ends = action.computation_type in (
                    schedules.FULL_BACKWARD,
                    schedules.BACKWARD_WEIGHT,
                )
                held += (action.computation_type == schedules.FORWARD) - ends
                most = max(most, held)
        return most / self.ranks.count(rank)

    @property
    def splits_backward(self) -> bool:
        """True if some backward of a stage's weights is apart from that of its inputs."""
        done = (action for row in self.actions.values() for action in row if action is not None)
        return any(action.computation_type == schedules.BACKWARD_INPUT for action in done)


MAX_SCHEDULE_BYTES, MAX_CELL = 1 << 20, 32
"""Size of the file of a pipeline schedule; characters of a cell, such as 12F255 or
(0F1;1B0)OVERLAP_F_B.
"""


def _read_rows(file: str) -> list[list[Any]]:
    """Return the actions of each rank, None where a cell is empty; raise ValueError for a file of
    something else.
    """
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device would not end
        raise ValueError("is no file")
    if found.st_size > MAX_SCHEDULE_BYTES:
        raise ValueError(f"has {found.st_size} bytes: must have at most {MAX_SCHEDULE_BYTES}")
    rows = []
    with open(file, newline="", encoding="utf-8-sig") as opened:
        for row in csv.reader(opened):
            for cell in row:
                if len(cell.strip()) > MAX_CELL:
                    raise ValueError(f"has a cell {cell[:20]!r}... of {len(cell)} characters")
            rows.append([schedules._Action.from_str(cell.strip()) for cell in row])
    return rows


def _count(numbers: Iterable[int | None], most: int, what: str) -> int:
    """Return the number of stages or micro-batches, each of which has an entry; raise ValueError
    for a larger one.
    """
    count = 1 + max(number or 0 for number in numbers)
    if count > most:
        raise ValueError(f"names {what} {count - 1}: with {most} entries there are at most {most}")
    return count


def read_csv_schedule(file: str, *, num_ranks: int) -> FileSchedule:
    """Read a pipeline schedule.

    PyTorch has neither a public reader nor a public check. Raises ValueError naming the file.
    """
    field = f"pipeline_parallel_schedule_csv={file!r}"
    lowered: dict[int, Any] = {}
    try:
        rows = _read_rows(file)
        actions = dict(enumerate(rows))
        done = [action for row in rows for action in row if action is not None]
        if not done or len(rows) != num_ranks:
            raise ValueError(f"has {len(rows)} rows: must have one for each of {num_ranks} ranks")
        num_stages = _count((action.stage_index for action in done), len(done), "stage")
        num_micro_batches = _count(
            (action.microbatch_index for action in done), len(done), "micro-batch"
        )
        if len(set(done)) < len(done):
            raise ValueError("an entry is there twice")
        if sent := [action for action in done if not action.is_compute_op]:
            raise ValueError(f"has {sent[0]}: must have no transfers, which follow from the rest")
        # PyTorch takes the losses of the last stage in this order.
        of_last = [action for action in done if action.stage_index == num_stages - 1]
        order = [a.microbatch_index for a in of_last if a.computation_type == schedules.FORWARD]
        if order != list(range(num_micro_batches)):
            raise ValueError(
                f"stage {num_stages - 1}, the last, must take the micro-batches forward in order"
            )
        ranks = schedules._validate_schedule(actions, num_ranks, num_stages, num_micro_batches)
        if idle := set(range(num_ranks)) - set(ranks.values()):
            raise ValueError(f"row {min(idle) + 1} has no entry: every rank must have a stage")
        for rank, row in actions.items():
            unsharded: Any = schedules._add_unshard_reshard(row)
            lowered[rank] = schedules._add_reduce_grad(unsharded, num_micro_batches)
        # Finds actions that wait for each other.
        schedules._add_send_recv(lowered, stage_to_rank=ranks.__getitem__, num_stages=num_stages)
    except (
        OSError, ValueError, RuntimeError, AssertionError, AttributeError, IndexError, KeyError,
        TypeError, csv.Error,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{field}: {reason[:300]}") from error
    return FileSchedule(
        ranks=tuple(ranks[stage] for stage in range(num_stages)),
        num_micro_batches=num_micro_batches,
        actions=actions,
    )


def csv_schedule(read: FileSchedule, stages: list[Any], **settings: Any) -> Any:
    """Return the schedule that a file describes; PyTorch has no public class for it."""
    schedule = schedules._PipelineScheduleRuntime(stages, read.num_micro_batches, **settings)
    schedule._prepare_schedule_with_comms(read.actions)
    return schedule


def gpus_with_context() -> list[int]:
    """Return the indices of the visible GPUs on which this process has a context, without opening
    one.

    A context takes about 0.5 GB. PyTorch has no public question for it; NVML knows processes by
    numbers that a container cannot read.
    """
    has = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # of the GPU builds
    return [index for index in range(torch.cuda.device_count()) if has(index)]
