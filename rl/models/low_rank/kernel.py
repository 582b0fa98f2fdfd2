"""Low-rank products of many adapters on a CPU, compiled by numba.

Each row of a batch takes the product of its own adapter, and in a mixture of its own expert. Rows
of an adapter are computed in tiles of four, and every number is a chain of fused multiply-adds in
one fixed order, so a row's bits do not depend on the other rows, their adapters, or the number of
threads.

Shape legend: T rows of a batch, M tiles of four rows, I input and O output width of a layer, N
products of an adapter's layer (of Hugging Face's weights in a fused one), R rank, J = N R in whole
narrow tiles, P columns in whole tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rl.models.batch_invariant.kernels import (
    COLUMNS,
    NARROW,
    ROWS,
    add_narrow_tile,
    add_tile,
    multiply_add,
    read_number,
)

# Columns of a table of adapters, one row an adapter: addresses and sizes of its arrays.
A, B, RUNS, NUM_RUNS, RANK, WIDTH = range(6)
NUM_FIELDS = 6
# Columns of an array of runs: consecutive columns of the output that belong to one product.
BEGIN, END, PRODUCT = range(3)

_compile = njit(nogil=True, cache=True, error_model="numpy")
_INT16, _INT32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


@intrinsic
def _to_pointer(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _write_number(typingctx: Any, like: Any, number: Any) -> Any:
    """Return a float32 as it is, or rounded to the bits of a bfloat16, to even, like PyTorch."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = values[1]
        if signature.args[0] == types.float32:
            return number
        bits = builder.bitcast(number, _INT32)
        odd = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _INT32(0x7FFF))), _INT32(16))
        is_nan = builder.fcmp_unordered("uno", number, number)
        return builder.trunc(builder.select(is_nan, _INT32(0x7FC0), rounded), _INT16)

    return like(like, types.float32), generate


@_compile
def add_low_rank(
    x: Any,
    out: Any,
    rows: Any,
    slots: Any,
    experts: Any,
    table: Any,
    scales: Any,
    begin: int,
    end: int,
) -> None:
    """Add scale * x A^T B^T of each row's adapter to `out`, for tiles begin to end.

    Args:
        x: [T, I] float32, or uint16 of bfloat16's bits; so are `out` [T, O] and the adapters'
            arrays A [I, J] and B [R, P], whose addresses `table` has, one expert after another.
        rows: [M, ROWS] rows of each tile, which have the same adapter; -1 for none.
        slots: [M] row of each tile's adapter in `table` and `scales`.
        experts: [M] number of each tile's expert, 0 for a layer without experts.
        table: int64; an address of 0 is an adapter without a product for this layer.
        scales: [adapters] float32.
    """
    width = x.shape[1]
    inputs = np.empty((ROWS, width), np.float32)
    for tile in range(begin, end):
        slot = slots[tile]
        entry = table[slot]
        if entry[A] == 0:
            continue
        rank, num_columns = entry[RANK], entry[WIDTH]
        of_a = entry[A] + experts[tile] * (width * num_columns * x.itemsize)
        a = carray(_to_pointer(of_a), (width, num_columns), x.dtype)
        for r in range(ROWS):
            # A row that is none computes with another's numbers, which nobody reads.
            from_row = x[max(rows[tile, r], 0)]
            for i in range(width):
                inputs[r, i] = read_number(from_row[i])
        low = np.zeros((ROWS, num_columns), np.float32)
        for column in range(0, num_columns, NARROW):
            add_narrow_tile(inputs, 0, a, column, width, low)
        runs = carray(_to_pointer(entry[RUNS]), (entry[NUM_RUNS], 3), np.int64)
        # Of all columns of the output: the last ones may belong to no run.
        stride = (out.shape[1] + COLUMNS - 1) // COLUMNS * COLUMNS + COLUMNS
        of_b = entry[B] + experts[tile] * (rank * stride * x.itemsize)
        b = carray(_to_pointer(of_b), (rank, stride), x.dtype)
        _add_runs(low, b, runs, rank, scales[slot], rows[tile], out)


@_compile
def _add_runs(low: Any, b: Any, runs: Any, rank: int, scale: Any, rows: Any, out: Any) -> None:
    added = np.empty((ROWS, COLUMNS), np.float32)
    for run in range(len(runs)):
        of_product = low[:, runs[run, PRODUCT] * rank :]
        for column in range(runs[run, BEGIN], runs[run, END], COLUMNS):
            added[:] = np.float32(0.0)
            # Columns beyond the run are computed too, and left out.
            add_tile(of_product, 0, b[:, column:], 0, rank, added)
            count = min(COLUMNS, runs[run, END] - column)
            for r in range(ROWS):
                if rows[r] < 0:
                    continue
                to = out[rows[r], column : column + count]
                for c in range(count):
                    total = multiply_add(scale, added[r, c], read_number(to[c]))
                    to[c] = _write_number(to[c], total)
