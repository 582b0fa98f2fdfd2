"""The C library's allocator, which on a CPU also holds PyTorch's tensors."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's numbers of two options of `mallopt`."""
NUM_KERNELS = "128"
"""Compiled products that oneDNN keeps, of about 1 MB each: several times those of a forward and
backward. Its default is 1024, and each number of rows needs its own."""


def keep_freed_memory() -> None:
    """Keep the memory that this process frees for its next tensors (glibc only); call it before any
    product.

    What lives longer leaves holes in it, oneDNN's kernels above all: call `give_back_freed_memory`
    now and then.

    By default glibc returns large blocks to the kernel, which clears every page of the next tensor
    as it is first written: a product with a result of 55 MB took 55 ms, of which the product itself
    was 13 (2 cores of an Intel Xeon with AMX, 2026-11-26).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", NUM_KERNELS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Return the pages that hold nothing to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
