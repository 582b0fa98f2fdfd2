"""Compute threads of one thread of a process.

PyTorch's CPU kernels run on a pool that OpenMP keeps for each thread that has started one. As
soon as the pools of a process together have more threads than there are cores, OpenMP lets idle
ones sleep rather than spin, and each small operation then waits for them to wake: matrix
products of 128 x 128 x 512 take 1.7 times as long. So in a process only the thread that
computes may have a pool.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()


def use_threads(count: int) -> None:
    """Let PyTorch's kernels run on `count` threads where the calling thread starts them.

    1 makes no pool. Other threads keep the count that they have called this with.
    """
    with _lock:
        torch.set_num_threads(count)
        # PyTorch also keeps the last count given anywhere, and a thread takes that over at its first
        # parallel operation. Reading makes the calling thread take over its own.
        torch.get_num_threads()
