"""The C library's allocator, which on a CPU also holds PyTorch's tensors."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's numbers of two options of `mallopt`."""


def keep_freed_memory() -> None:
    """Keep the memory that this process frees for its next tensors; does nothing without glibc.

    By default glibc returns large blocks to the kernel, which clears every page of the next tensor as it is first
    written: a product with a result of 55 MB took 55 ms, of which the product itself was 13 (2 cores of an Intel
    Xeon with AMX, 2026-11-26).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
