"""Run a function on several gloo ranks, each in a separate process.

    results = run_ranks(worker, 4, folder, timeout_s=60)   # [worker(folder) of rank 0, 1, 2, 3]

The function must be importable. It finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in
its environment, as under torchrun.

The processes are forked from a server that has imported the engine and has no threads: importing
it takes each of them 3 s otherwise.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from actors.launch.cleanup import free_port

EXIT_S = 5.0
"""Time for ranks to exit by themselves after they have answered or closed their pipe."""
STACKS_S = 5.0
"""Time before the timeout at which ranks that still run write their stacks."""
_PRELOADED = ["rl.training.engine", "torch.distributed.fsdp", "torch.distributed.checkpoint"]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float
) -> list[Any]:
    """Run the function on all ranks and return the results by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that raised, or the exit code of the one
            that died; the others are killed.
        TimeoutError: naming the ranks that had not answered, which have written their stacks to
            stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    world = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process: BaseProcess = context.Process(
                target=_child, args=(function, args, own, theirs, timeout_s - STACKS_S), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = _collect(pipes, processes, name=function.__name__, timeout_s=timeout_s)
        for process in processes:
            process.join(EXIT_S)  # Killed ranks would leave their semaphores in /dev/shm.
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(
    pipes: list[Connection], processes: list[BaseProcess], *, name: str, timeout_s: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"{name}: ranks {sorted(pending.values())} did not answer in {timeout_s:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending[pipe]
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                processes[rank].join(EXIT_S)
                raise RuntimeError(
                    f"{name}: rank {rank} died with exit code {processes[rank].exitcode}"
                ) from None
            if error is not None:
                raise RuntimeError(f"{name}: rank {rank} raised\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world: dict[str, str],
    pipe: Connection,
    stacks_s: float,
) -> None:
    faulthandler.dump_traceback_later(stacks_s)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= world
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((None, function(*args)))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent raises it
        pipe.send((traceback.format_exc(), None))
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
