"""Private parts of PyTorch that relay uses, each with its reason.

Checked with PyTorch 2.11 and 2.13. Those of pipelines are in `rl.distributed.schedule_private`.
"""

from __future__ import annotations

import os
import pickle
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, default_pg_timeout
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.stateless import _reparametrize_module

# Collectives that a compiler can trace, with groups by name; those of `torch.distributed` write
# into tensors that they are given.
collective_ops = torch.ops._c10d_functional

# The placement of a parameter that FSDP has sharded over tensor parallelism. It is no subclass of
# `Shard`, and has no public name.
StridedShard = _StridedShard


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
        options = _make_gloo_options(timeout) if isinstance(timeout, timedelta) else timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_one  # type: ignore[method-assign, assignment]


def _make_gloo_options(timeout: timedelta) -> Any:
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


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh's axes as a single axis; PyTorch has no public call for it."""
    return mesh._flatten(name)


def allow_variants(num_variants: int) -> None:
    """Let the compiler keep at least so many variants of a function, beyond which it gives up.

    The limit has no public name, and counts for the whole process.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, num_variants)


def is_awaited(value: Any) -> bool:
    """Return whether a collective may still be writing the tensor; its type has no public name."""
    return isinstance(value, AsyncCollectiveTensor)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the deadline of a group's later collectives; PyTorch has no public call for it."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def read_recorded_collectives() -> list[dict[str, Any]]:
    """Return the flight recorder's entries, oldest first; PyTorch has no public reader."""
    # NCCL keeps a record of its own.
    bindings = torch._C._distributed_c10d
    name = "_dump_nccl_trace" if "nccl" in dist.get_backend_config() else "_dump_fr_trace"
    dump = getattr(bindings, name, None)
    return [] if dump is None else pickle.loads(dump()).get("entries", [])


def replace_parameters(
    module: nn.Module, tensors: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """Put tensors in place of parameters within the block."""
    # The public `functional_call` would call the module, and so FSDP's hooks around its forward.
    return _reparametrize_module(module, tensors)


def enable_micro_pipeline(group: dist.ProcessGroup) -> None:
    """Let the compiler overlap this group's collectives with matrix products."""
    # Only private switches exist, of the compiler and of the memory that GPUs share.
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def find_gpus_with_context() -> list[int]:
    """Return the indices of the visible GPUs on which this process has a context.

    A context takes about 0.5 GB. The question opens none.
    """
    # PyTorch has no public question for it; NVML knows processes by numbers that a container cannot
    # read.
    has = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # of the GPU builds
    return [index for index in range(torch.cuda.device_count()) if has(index)]
