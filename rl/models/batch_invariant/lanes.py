"""Vectors of floating-point numbers in functions that are compiled by numba, which has none: parts
of the LLVM code that the kernels' intrinsics generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT, INT16, INT32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)


def find_item(
    context: Any, builder: Any, signature: Any, values: Any, *, argument: int, indices: Any
) -> Any:
    """Return the pointer to an item of an array, which is an argument of an intrinsic."""
    kind = signature.args[argument]
    array = context.make_array(kind)(context, builder, values[argument])
    return cgutils.get_item_pointer(context, builder, kind, array, indices)


def fill_lanes(builder: Any, number: Any, lanes: int) -> Any:
    """Return a vector that holds a float32 in all lanes."""
    undefined = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT32, 0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, undefined, mask)


def load_lanes(builder: Any, item: Any, lanes: int) -> Any:
    """Return the vector that begins at an item, a float32 or a bfloat16's bits, as float32."""
    if item.type.pointee == FLOAT:
        place = builder.bitcast(item, ir.VectorType(FLOAT, lanes).as_pointer())
        return builder.load(place, align=4)
    place = builder.bitcast(item, ir.VectorType(INT16, lanes).as_pointer())
    wide = builder.zext(builder.load(place, align=2), ir.VectorType(INT32, lanes))
    return builder.bitcast(
        builder.shl(wide, _fill_constant(INT32, 16, lanes)), ir.VectorType(FLOAT, lanes)
    )


def store_lanes(builder: Any, vector: Any, item: Any) -> None:
    """Store a vector at an item as float32, or rounded to bfloat16's bits, to even, like
    PyTorch.
    """
    lanes = vector.type.count
    if item.type.pointee == FLOAT:
        place = builder.bitcast(item, ir.VectorType(FLOAT, lanes).as_pointer())
        builder.store(vector, place, align=4)
        return
    bits = builder.bitcast(vector, ir.VectorType(INT32, lanes))
    high = builder.lshr(bits, _fill_constant(INT32, 16, lanes))
    odd = builder.and_(high, _fill_constant(INT32, 1, lanes))
    up = builder.add(bits, builder.add(odd, _fill_constant(INT32, 0x7FFF, lanes)))
    rounded = builder.lshr(up, _fill_constant(INT32, 16, lanes))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    chosen = builder.select(is_nan, _fill_constant(INT32, 0x7FC0, lanes), rounded)
    halves = ir.VectorType(INT16, lanes)
    builder.store(
        builder.trunc(chosen, halves), builder.bitcast(item, halves.as_pointer()), align=2
    )


def multiply_add_lanes(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c of vectors, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    name = f"llvm.fma.v{a.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def add_up_tile(
    builder: Any,
    sums: Sequence[Sequence[Any]],
    count: Any,
    *,
    find_factor: Callable[[int, Any], Any],
    find_numbers: Callable[[Any, int], Any],
) -> list[list[Any]]:
    """Return the vectors sums[r][n] plus the sum over i < count of factor[r, i] numbers[i, n], in
    the order of i.

    Args:
        find_factor: returns the pointer to the float32 of row r and step i.
        find_numbers: returns the pointer to the first item of the nth vector of step i.
    """
    # The sums stay in registers over the whole loop: a load and a store for each step would cost
    # more than the multiply-add.
    totals = [[cgutils.alloca_once_value(builder, vector) for vector in row] for row in sums]
    lanes = sums[0][0].type.count
    with cgutils.for_range(builder, count, intp=count.type) as loop:
        vectors = [
            load_lanes(builder, find_numbers(loop.index, n), lanes) for n in range(len(sums[0]))
        ]
        for r, row in enumerate(totals):
            number = builder.load(find_factor(r, loop.index))
            factor = fill_lanes(builder, number, lanes)
            for total, vector in zip(row, vectors, strict=True):
                added = multiply_add_lanes(builder, factor, vector, builder.load(total))
                builder.store(added, total)
    return [[builder.load(total) for total in row] for row in totals]


def make_add_tile(num_rows: int, num_vectors: int, lanes: int) -> Any:
    """Return the function that adds a tile of `num_rows` rows and `num_vectors` x `lanes`
    columns.
    """

    @intrinsic
    def add_tile(
        typingctx: Any, a: Any, row: Any, b: Any, column: Any, count: Any, out: Any
    ) -> Any:
        """Add the sum over i < count of a[row + r, i] b[i, column + c] to out[row + r, column + c],
        for the rows r and the columns c of a tile.

        The sums run in the order of i, starting from the values in `out`. Nothing is checked; rows
        of b and out are contiguous. `a` and `out` are float32, b float32 or a bfloat16's bits.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _, row, _, column, count, _ = values
            find = partial(find_item, context, builder, signature, values)
            parts = [builder.add(column, column.type(n * lanes)) for n in range(num_vectors)]
            rows = [builder.add(row, row.type(r)) for r in range(num_rows)]
            places = [[find(argument=5, indices=[row, part]) for part in parts] for row in rows]
            sums = add_up_tile(
                builder,
                [[load_lanes(builder, place, lanes) for place in of_row] for of_row in places],
                count,
                find_factor=lambda r, i: find(argument=0, indices=[rows[r], i]),
                find_numbers=lambda i, n: find(argument=2, indices=[i, parts[n]]),
            )
            for total, place in zip(chain(*sums), chain(*places), strict=True):
                store_lanes(builder, total, place)
            return context.get_dummy_value()

        return types.void(a, row, b, column, count, out), generate

    return add_tile


def _fill_constant(kind: Any, value: int, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)
