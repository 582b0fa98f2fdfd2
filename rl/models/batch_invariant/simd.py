"""The arithmetic of the batch-invariant kernels, in vectors of fixed shape, for numba.

Every number is a chain of fused multiply-adds in one fixed order, so its bits depend on nothing
but its operands: not on what is computed beside it, on threads, or on the width of the
machine's vectors. No fast-math flag is set, so the compiler may not change an order.

Arrays are flat and C-contiguous, places in them are offsets, and nothing is checked: the
caller sees to it that whole tiles lie within. A float32 array may be given as uint16 instead,
the bits of bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 4
"""Rows of one tile."""
LANES = 16
"""Numbers of one vector."""
COLUMNS = 2 * LANES
"""Columns of one tile: eight sums are under way at a time, which hides a multiply-add's latency."""

_FLOAT, _INT16, _INT32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _load_vector(builder: Any, data: Any, index: Any) -> Any:
    """LANES float32 from an array of float32 or of bfloat16's bits."""
    at = builder.gep(data, [index], inbounds=True)
    if at.type.pointee == _FLOAT:
        return builder.load(builder.bitcast(at, _VECTOR.as_pointer()), align=4)
    short = ir.VectorType(_INT16, LANES)
    wide = ir.VectorType(_INT32, LANES)
    bits = builder.zext(builder.load(builder.bitcast(at, short.as_pointer()), align=2), wide)
    return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * LANES)), _VECTOR)


def _splat(builder: Any, data: Any, index: Any) -> Any:
    value = builder.load(builder.gep(data, [index], inbounds=True))
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INT32, 0))
    mask = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), mask)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    return builder.call(function, [a, b, c])


@intrinsic
def add_products(
    typingctx: Any,
    a: Any, a_rows: Any, a_step: Any,
    b: Any, b_start: Any, b_step: Any,
    count: Any,
    out: Any, out_rows: Any,
) -> Any:  # fmt: skip
    """out[out_rows[r] + c] += sum over i of a[a_rows[r] + i a_step] b[b_start + i b_step + c].

    For r in 0..ROWS-1 and c in 0..COLUMNS-1, each in the order of i, from what is in `out`.

    Args:
        a: float32.
        a_rows: ROWS offsets, a tuple; so is out_rows. Rows may be the same.
        b: float32, or uint16.
        count: of i.
        out: float32.
    """
    signature = types.void(a, a_rows, a_step, b, b_start, b_step, count, out, out_rows)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a_value, a_rows, a_step, b_value, b_start, b_step, count, out_value, out_rows = values
        a_data = _data(context, builder, signature.args[0], a_value)
        b_data = _data(context, builder, signature.args[3], b_value)
        out_data = _data(context, builder, signature.args[7], out_value)
        lanes = ir.Constant(b_start.type, LANES)
        starts = cgutils.unpack_tuple(builder, a_rows, ROWS)
        places: list[Any] = []
        for row in cgutils.unpack_tuple(builder, out_rows, ROWS):
            places += [row, builder.add(row, lanes)]
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
        for total, place in zip(sums, places, strict=True):
            builder.store(_load_vector(builder, out_data, place), total)
        with cgutils.for_range(builder, count, intp=count.type) as loop:
            first = builder.add(b_start, builder.mul(loop.index, b_step))
            columns = [_load_vector(builder, b_data, x) for x in (first, builder.add(first, lanes))]
            shift = builder.mul(loop.index, a_step)
            for row, start in enumerate(starts):
                factor = _splat(builder, a_data, builder.add(start, shift))
                for half, column in enumerate(columns):
                    total = sums[2 * row + half]
                    builder.store(_fma(builder, factor, column, builder.load(total)), total)
        for total, place in zip(sums, places, strict=True):
            at = builder.bitcast(builder.gep(out_data, [place], inbounds=True), _VECTOR.as_pointer())
            builder.store(builder.load(total), at, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _fused(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _bits(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _INT32)

    return types.int32(types.float32), generate


@intrinsic
def _from_bits(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _FLOAT)

    return types.float32(types.int32), generate


_ONE = np.float32(1.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUND = np.float32(1.5 * 2**23)
"""Added, it leaves the nearest integer in the low bits of the sum."""
_ROUND_BITS = np.int32(0x4B400000)
# ln 2 in two parts, of which the first times an exponent is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Cephes' polynomial for exp on [-ln 2 / 2, ln 2 / 2].
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c)
    for c in (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 5.00000012e-1)
)  # fmt: skip
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)


@njit(inline="always")
def exponential(x: Any) -> Any:
    """exp of a float32 to 1e-7 of its value; outside -87 to 88 that of the nearer end."""
    x = min(max(x, _LOWEST), _HIGHEST)
    shifted = _fused(x, _LOG2_E, _ROUND)
    exponent = shifted - _ROUND
    rest = _fused(exponent, -_LN2_LOW, _fused(exponent, -_LN2_HIGH, x))
    y = _fused(_C0, rest, _C1)
    y = _fused(y, rest, _C2)
    y = _fused(y, rest, _C3)
    y = _fused(y, rest, _C4)
    y = _fused(y, rest, _C5)
    y = _fused(y, rest * rest, rest) + _ONE
    power = (_bits(shifted) - _ROUND_BITS + np.int32(127)) << np.int32(23)
    return y * _from_bits(np.int32(power))
