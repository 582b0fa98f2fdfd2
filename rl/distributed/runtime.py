"""Random states, determinism and compute threads of a process."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import torch


def check_seed(seed: int, *, field: str = "seed", below: int = 2**63) -> None:
    """Raise ValueError, naming the field, unless 0 <= seed < below."""
    if not 0 <= seed < below:
        raise ValueError(f"{field}={seed}: must be at least 0 and below {below}")


def seed_everything(seed: int, *, offset: int = 0, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and PyTorch's generators, on every device, with `seed + offset`.

    Args:
        offset: per-rank offset; 0 on ranks that must draw the same numbers.
        deterministic: forbid kernels whose result depends on scheduling; slower, and an operation without a
            deterministic kernel raises RuntimeError.
    """
    random.seed(seed + offset)
    np.random.seed((seed + offset) % 2**32)
    torch.manual_seed(seed + offset)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


_lock = threading.Lock()


def use_threads(count: int) -> None:
    """Run the PyTorch kernels that the calling thread starts on `count` threads.

    OpenMP keeps a pool of threads for every thread that has started a parallel kernel. As soon as the pools of a
    process together have more threads than there are cores, idle threads sleep instead of spinning, and each
    small kernel waits for them to wake: matrix products of 128 x 128 x 512 take 1.7 times as long. So only the
    computing thread of a process should have a pool; a count of 1 creates none. Other threads keep their counts.
    """
    with _lock:
        torch.set_num_threads(count)
        # PyTorch also stores the last count set by any thread, and a thread adopts it at its first parallel
        # operation. Reading the count makes the calling thread adopt its own.
        torch.get_num_threads()
