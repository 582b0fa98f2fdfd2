"""One worker thread for each group of gloo, because two corrupt the heap.

PyTorch 2.13 runs the collectives of a group on two threads. Each, when it has ended one and told the
caller so, assigns the collective's name to a string that both threads share, without a lock
(`lastCompletedWorkName`, in `ProcessGroupGloo::runLoop`). Names of up to 15 characters lie in the
string itself. That of a functional all-gather, which is how DTensor gathers, is ALLGATHER_COALESCED
and lies on the heap: of two threads that assign at the same time one writes into what the other has
freed, or both free it, and the process dies of it at a later allocation. All-gathers and sums of 4
numbers, 32 started at a time, get there within 0.2 s.

On one thread the collectives of a group run in the order in which they were started. That this order
is the same on all ranks is required of them anyway.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, default_pg_timeout


@cache
def use_one_worker() -> None:
    """Let every group of gloo that this process makes from now on have one worker thread.

    However it is made: PyTorch takes options of groups from its callers, but none of gloo's.
    """
    make = ProcessGroupGloo.__init__

    def make_with_one(
        group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: Any = default_pg_timeout
    ) -> None:
        # In the place of the timeout PyTorch takes options too.
        options = _options(timeout) if isinstance(timeout, timedelta) else timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_one  # type: ignore[method-assign, assignment]


def _options(timeout: timedelta) -> Any:
    """PyTorch's own but for the number of threads: that of devices, twice."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return options
