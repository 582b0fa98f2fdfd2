"""Checksums of tensors that do not depend on how they are laid out.

The sum of a box of a tensor is

    sum over its elements of  bits * column weight * row weight      (mod 2**64)

where *bits* are the element's bits as an unsigned number, and the weights depend only on the
element's place in the whole tensor: on its column, counted in blocks of `BLOCK` of the last dim, and
on its row and block. So the sums of disjoint boxes add up to that of the tensor however it is cut.
A column weight lies between 1 and 2**32 - 1 and a row weight is odd, so one wrong element always
changes the sum; two elements or rows that changed places do too, but for a chance of about 2**-32.
Elements of 8 bytes count as two of 4.

On a CPU a compiled loop sums about 20 GB/s a core; `sum_by_torch` is the same definition in
PyTorch's operations, for tensors on a GPU (on a CPU it sums 1.4 GB/s).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.tensor_memory import memory_of

BLOCK = 4096
"""Columns; their weights stay in a core's first cache."""
_SLAB_ELEMENTS = 2**24
"""How many elements `sum_by_torch` widens to 8 bytes at a time."""
_MASK = np.uint64(2**64 - 1)


def checksum(tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The sum of a tensor that is the box at `offsets` of one of `global_shape`."""
    if tensor.numel() == 0:
        return 0
    if tensor.device.type != "cpu":
        return sum_by_torch(tensor, global_shape=global_shape, offsets=offsets)
    bits, first_column, num_blocks = _bits(tensor, global_shape, offsets)
    span = 1 + sum((size - 1) * stride for size, stride in zip(bits.shape, bits.stride(), strict=True))
    flat = memory_of(bits, dtype=f"u{bits.element_size()}", num_elements=span)
    sum_rows, weights, num_columns, total = _kernel(), _column_weights(), bits.shape[-1], 0
    for start, row, num_rows, stride in _slabs(bits, global_shape, offsets):
        part = flat[start:]
        total += int(sum_rows(part, num_rows, stride, row, first_column, num_columns, num_blocks, weights))
    return total % 2**64


def sum_by_torch(tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """`checksum` by PyTorch's operations, on the tensor's device."""
    if tensor.numel() == 0:
        return 0
    bits, first_column, num_blocks = _bits(tensor, global_shape, offsets)
    slabs = _slabs(bits, global_shape, offsets)
    rows = np.concatenate([np.arange(row, row + num, dtype=np.uint64) for _, row, num, _ in slabs])
    num_columns = bits.shape[-1]
    bits = bits.reshape(-1, num_columns)
    mask = 2 ** (8 * bits.element_size()) - 1
    weights = torch.from_numpy(_column_weights().astype(np.int64)).to(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = max(1, _SLAB_ELEMENTS // min(num_columns, BLOCK))
    for block in range(first_column // BLOCK, (first_column + num_columns - 1) // BLOCK + 1):
        first = max(block * BLOCK, first_column)
        last = min((block + 1) * BLOCK, first_column + num_columns)
        row_weights = torch.from_numpy(_mix(rows * np.uint64(num_blocks) + np.uint64(block)).view(np.int64))
        for start in range(0, len(bits), step):
            slab = bits[start : start + step, first - first_column : last - first_column].long() & mask
            sums = (slab * weights[first - block * BLOCK : last - block * BLOCK]).sum(1)
            total += (sums * row_weights[start : start + step].to(bits.device)).sum()
    return int(total.item()) % 2**64


def _bits(tensor: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> tuple[Tensor, int, int]:
    """The tensor as integers of at most 4 bytes with at least one dim, its first column, and in how many
    blocks a row of the whole tensor lies."""
    if tensor.dim() == 0:
        tensor, global_shape, offsets = tensor.reshape(1), (1,), (0,)
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    size = tensor.element_size()
    bits = tensor.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))
    per_element = max(1, size // 4)
    return bits, offsets[-1] * per_element, -(-global_shape[-1] * per_element // BLOCK)


def _slabs(
    bits: Tensor, global_shape: Sequence[int], offsets: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Rows that follow one another in the whole tensor and lie equally far apart in memory.

    Of each such run: where it starts in memory (elements), number of its first row in the whole tensor,
    how many rows, and how far apart (elements).
    """
    slabs = [(0, 0, 1, 0)]
    for size, stride, whole, offset in zip(
        bits.shape[:-1], bits.stride()[:-1], global_shape[:-1], offsets[:-1], strict=True
    ):
        if all(num == 1 for _, _, num, _ in slabs):
            slabs = [(start, row * whole + offset, size, stride) for start, row, _, _ in slabs]
        elif size == whole and all(apart == size * stride for _, _, _, apart in slabs):
            slabs = [(start, row * whole, num * size, stride) for start, row, num, _ in slabs]
        else:
            slabs = [
                (start + i * apart, (row + i) * whole + offset, size, stride)
                for start, row, num, apart in slabs
                for i in range(num)
            ]
    return slabs


def _mix(x: np.ndarray) -> np.ndarray:
    """[R] uint64 -> odd row weights: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@cache
def _column_weights() -> np.ndarray:
    """[BLOCK] uint32, all different and none 0: the finalizer of MurmurHash3, which maps only 0 to 0."""
    x = np.arange(1, BLOCK + 1, dtype=np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@cache
def _kernel() -> Any:
    """The compiled loop; numba, which takes half a second to load, is only imported where it is used."""
    from rl.weights.sum_kernel import sum_rows

    return sum_rows
