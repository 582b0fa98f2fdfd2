"""The loop of `rl.weights.sums.checksum`, compiled by numba; runs without Python's lock."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64


@njit(nogil=True, cache=True)
def _row_weight(x: int) -> int:
    """As `rl.weights.sums._mix`."""
    x = uint64(x) + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return (x ^ (x >> uint64(31))) | uint64(1)


@njit(nogil=True, cache=True)
def sum_rows(
    bits: np.ndarray,
    num_rows: int,
    stride: int,
    first_row: int,
    first_column: int,
    num_columns: int,
    num_blocks: int,
    weights: np.ndarray,
) -> int:
    """
    Args:
        bits: uint8, uint16 or uint32, one after another in memory.
        stride: from one row to the next in `bits`.
        first_row, first_column: in the whole tensor.
        num_blocks: of a row of the whole tensor.
        weights: [BLOCK] uint32, of the columns of a block.
    """
    num_weights = weights.shape[0]
    total = uint64(0)
    for r in range(num_rows):
        start, done = r * stride, 0
        while done < num_columns:
            block = (first_column + done) // num_weights
            place = first_column + done - block * num_weights
            size = min(num_columns - done, num_weights - place)
            some = bits[start + done : start + done + size]
            their_weights = weights[place : place + size]
            row_sum = uint64(0)
            # 16 or 32 bits times 32 bits: one multiplication of the processor's vector unit.
            for k in range(size):
                row_sum += uint64(some[k]) * uint64(their_weights[k])
            total += row_sum * _row_weight(uint64(first_row + r) * uint64(num_blocks) + uint64(block))
            done += size
    return total
