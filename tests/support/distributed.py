"""Run a function on several gloo ranks, each a process of its own.

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
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

EXIT_S = 5.0
"""How long ranks that have answered, or closed their pipe, may take to end by themselves."""
_PRELOADED = ["rl.training.engine", "torch.distributed.fsdp", "torch.distributed.checkpoint"]


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float) -> list[Any]:
    """Results by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that raised, or the signal or exit status of the
            one that died, and the Python stacks of its threads if it crashed; the others are killed.
        TimeoutError: naming the ranks that had not answered.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = free_port()
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        stacks = [Path(folder, f"rank{rank}") for rank in range(num_ranks)]
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_child,
                    args=(function, args, rank, num_ranks, port, theirs, stacks[rank]),
                    daemon=True,
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            results = _collect(pipes, processes, stacks, name=function.__name__, timeout_s=timeout_s)
            for process in processes:
                process.join(EXIT_S)  # Killed, they would leave their semaphores in /dev/shm.
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: list[Connection],
    processes: list[BaseProcess],
    stacks: list[Path],
    *,
    name: str,
    timeout_s: float,
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{name}: ranks {sorted(pending.values())} did not answer in {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending[pipe]
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                how = _how_it_died(processes[rank], stacks[rank])
                raise RuntimeError(f"{name}: rank {rank} died {how}") from None
            if error is not None:
                raise RuntimeError(f"{name}: rank {rank} raised\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _how_it_died(process: BaseProcess, stacks: Path) -> str:
    """Such as `of SIGSEGV`, and where each of its threads was."""
    process.join(EXIT_S)
    status = process.exitcode
    if status is None:
        how = f"to us: it closed its pipe, but did not exit in {EXIT_S:g} s"
    elif status < 0:
        how = f"of {signal.Signals(-status).name}"
    else:
        how = f"with exit status {status}"
    told = stacks.read_text(errors="replace") if stacks.exists() else ""
    return f"{how}\n{told}".rstrip()


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    pipe: Connection,
    stacks: Path,
) -> None:
    # Not to stderr: that is wherever the fork server's went as the first test started it.
    crashed = stacks.open("w")
    faulthandler.enable(crashed)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
