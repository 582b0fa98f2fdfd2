"""Low-rank products of many adapters on a CPU, compiled by numba.

Each row of a batch takes the product of its own adapter, and in a mixture of its own expert. Rows
of an adapter are computed in tiles of eight, four or one, and every number is a chain of fused
multiply-adds in one fixed order, so a row's bits do not depend on the other rows, their adapters,
or the number of threads.

Shape legend: T rows of a batch, M tiles of eight rows, I input and O output width of a layer, N
products of an adapter's layer (of Hugging Face's weights in a fused one), R rank, J = N R in whole
narrow tiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rl.models.batch_invariant.kernels import LANES, read_number
from rl.models.batch_invariant.lanes import (
    FLOAT,
    INT16,
    add_up_tile,
    fill_lanes,
    find_item,
    load_lanes,
    make_add_tile,
    multiply_add_lanes,
    store_lanes,
)

ROWS = 8
"""Rows of one tile: eight sums in flight hide the latency of a multiply-add."""
NARROW = 8
"""Columns of the last tiles of A, whose width is a multiple of it."""

# Columns of a table of adapters, one row an adapter: addresses and sizes of its arrays.
A, B, RUNS, NUM_RUNS, RANK, WIDTH = range(6)
NUM_FIELDS = 6
# Columns of an array of runs: consecutive columns of the output that belong to one product.
BEGIN, END, PRODUCT = range(3)

_compile = njit(nogil=True, cache=True, error_model="numpy")
# Not cached by themselves: their code is part of the function that calls them.
_inline = njit(nogil=True, error_model="numpy")


@intrinsic
def _to_pointer(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _make_add_product(num_rows: int, num_vectors: int, lanes: int) -> Any:
    """Return the function that adds the product with B for `num_rows` rows and `num_vectors` x
    `lanes` columns.
    """

    @intrinsic
    def add_product(
        typingctx: Any,
        low: Any,
        first: Any,
        b: Any,
        column: Any,
        rank: Any,
        scale: Any,
        places: Any,
    ) -> Any:
        """Add scale * sum over i < rank of low[r, first + i] b[i, column + c] to row r of the
        output, which begins at the address places[r], for the rows r and the columns c of a tile.

        Nothing is checked. `b` and the output are float32, or a bfloat16's bits.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _, first, _, column, rank, scale, _ = values
            find = partial(find_item, context, builder, signature, values)
            rows = [column.type(r) for r in range(num_rows)]
            parts = [builder.add(column, column.type(n * lanes)) for n in range(num_vectors)]
            zero = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
            sums = add_up_tile(
                builder,
                [[zero] * num_vectors] * num_rows,
                rank,
                find_factor=lambda r, i: find(argument=0, indices=[rows[r], builder.add(first, i)]),
                find_numbers=lambda i, n: find(argument=2, indices=[i, parts[n]]),
            )
            factor = fill_lanes(builder, scale, lanes)
            stored = FLOAT if b.dtype == types.float32 else INT16
            for row, totals in zip(rows, sums, strict=True):
                address = builder.load(find(argument=6, indices=[row]))
                begin = builder.inttoptr(address, stored.as_pointer())
                for part, total in zip(parts, totals, strict=True):
                    item = builder.gep(begin, [part])
                    before = load_lanes(builder, item, lanes)
                    store_lanes(builder, multiply_add_lanes(builder, factor, total, before), item)
            return context.get_dummy_value()

        return types.void(low, first, b, column, rank, scale, places), generate

    return add_product


def _make_products(num_rows: int, num_vectors: int) -> tuple[Any, Any]:
    """Return the functions that compute the products with A and B of `num_rows` rows, in tiles of
    `num_vectors` vectors.
    """
    num_columns = num_vectors * LANES
    add_tile = make_add_tile(num_rows, num_vectors, LANES)
    add_narrow_tile = make_add_tile(num_rows, 1, NARROW)
    add_product = _make_add_product(num_rows, num_vectors, LANES)
    add_vector = _make_add_product(num_rows, 1, LANES)
    add_column = _make_add_product(num_rows, 1, 1)

    @_inline
    def multiply(inputs: Any, a: Any, low: Any) -> None:
        """Add the product of the inputs and A to `low`, as wide as A."""
        width, end = a.shape
        column = 0
        while column + num_columns <= end:
            add_tile(inputs, 0, a, column, width, low)
            column += num_columns
        while column < end:
            add_narrow_tile(inputs, 0, a, column, width, low)
            column += NARROW

    @_inline
    def add_run(low: Any, b: Any, run: Any, rank: int, scale: Any, places: Any) -> None:
        """Add the product of `low` and a run of B's columns to the output."""
        first = run[PRODUCT] * rank
        column, end = run[BEGIN], run[END]
        while column + num_columns <= end:
            add_product(low, first, b, column, rank, scale, places)
            column += num_columns
        while column + LANES <= end:
            add_vector(low, first, b, column, rank, scale, places)
            column += LANES
        while column < end:
            add_column(low, first, b, column, rank, scale, places)
            column += 1

    return multiply, add_run


# As many sums are in flight as hide the latency of a multiply-add, where there are rows for them.
_multiply_8, _add_run_8 = _make_products(ROWS, 1)
_multiply_4, _add_run_4 = _make_products(4, 2)
_multiply_1, _add_run_1 = _make_products(1, 2)


@_inline
def _read_rows(x: Any, out: Any, rows: Any, inputs: Any, no_row: Any, places: Any) -> int:
    """Copy the inputs of a tile's rows, and find where their outputs begin.

    Returns:
        How many are computed; a row that is none computes with another's numbers.
    """
    count = 1
    while count < ROWS and rows[count] >= 0:
        count += 1
    num_rows = ROWS if count > 4 else 4 if count > 1 else 1
    for r in range(num_rows):
        row = rows[r]
        from_row = x[max(row, 0)]
        for i in range(len(from_row)):
            inputs[r, i] = read_number(from_row[i])
        places[r] = out[row].ctypes.data if row >= 0 else no_row.ctypes.data
    return num_rows


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
            arrays A [I, J] and B [R, O], whose addresses `table` has, one expert after another.
        rows: [M, ROWS] rows of each tile, which have the same adapter; -1 for none, at the end.
        slots: [M] row of each tile's adapter in `table` and `scales`.
        experts: [M] number of each tile's expert, 0 for a layer without experts.
        table: int64; an address of 0 is an adapter without a product for this layer.
        scales: [adapters] float32.
    """
    width, num_out = x.shape[1], out.shape[1]
    inputs = np.empty((ROWS, width), np.float32)
    # Of a row that is none; nobody reads it.
    no_row = np.empty(num_out, out.dtype)
    places = np.empty(ROWS, np.int64)
    low = np.empty((ROWS, 0), np.float32)
    for tile in range(begin, end):
        slot = slots[tile]
        entry = table[slot]
        if entry[A] == 0:
            continue
        num_rows = _read_rows(x, out, rows[tile], inputs, no_row, places)
        rank, num_columns = entry[RANK], entry[WIDTH]
        of_a = entry[A] + experts[tile] * (width * num_columns * x.itemsize)
        a = carray(_to_pointer(of_a), (width, num_columns), x.dtype)
        if low.shape[1] != num_columns:
            low = np.empty((ROWS, num_columns), np.float32)
        low[:] = np.float32(0.0)
        if num_rows == ROWS:
            _multiply_8(inputs, a, low)
        elif num_rows == 4:
            _multiply_4(inputs, a, low)
        else:
            _multiply_1(inputs, a, low)
        runs = carray(_to_pointer(entry[RUNS]), (entry[NUM_RUNS], 3), np.int64)
        of_b = entry[B] + experts[tile] * (rank * num_out * x.itemsize)
        b = carray(_to_pointer(of_b), (rank, num_out), x.dtype)
        for run in range(len(runs)):
            if num_rows == ROWS:
                _add_run_8(low, b, runs[run], rank, scales[slot], places)
            elif num_rows == 4:
                _add_run_4(low, b, runs[run], rank, scales[slot], places)
            else:
                _add_run_1(low, b, runs[run], rank, scales[slot], places)
