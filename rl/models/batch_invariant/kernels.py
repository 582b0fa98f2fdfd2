"""Attention and an exponential with results that do not depend on the batch, compiled by numba.

Every number is a chain of fused multiply-adds in one fixed order, so its bits depend only on its
operands, not on the rest of the batch, on threads, or on the width of the machine's vectors. No
fast-math flag is set, so the compiler may vectorize over independent numbers but not change an
order. A score is a chain over the head's dimensions, a softmax adds sixteen partial sums in one
fixed tree, and an output is a chain over its keys in order of position. A query's result is
therefore the same with its whole sequence, with a part of it, or over a cache.

Shape legend: T tokens, N keys of all segments, n keys of one segment, S segments, H query heads, K
key-value heads, G = H / K, D head size, M blocks of a cache, B keys of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from rl.models.batch_invariant.lanes import FLOAT, INT32, make_add_tile

ROWS = 4
"""Rows of one tile of a product."""
LANES = 16
"""Numbers of one vector, and partial sums of a softmax."""
COLUMNS = 2 * LANES
"""Columns of one tile: eight sums in flight hide the latency of a multiply-add."""
BLOCK_TOKENS = 64
"""Tokens whose shares of a key's gradient are added head by head."""

_compile = njit(nogil=True, cache=True, error_model="numpy")


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def read_number(typingctx: Any, x: Any) -> Any:
    """Return a float32, or the float32 of a bfloat16's bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.args[0] == types.float32:
            return values[0]
        wide = builder.zext(values[0], INT32)
        return builder.bitcast(builder.shl(wide, ir.Constant(INT32, 16)), FLOAT)

    return types.float32(x), generate


add_tile = make_add_tile(ROWS, 2, LANES)


_ZERO, _ONE, _THREE = np.float32(0.0), np.float32(1.0), np.float32(3.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUND = np.float32(1.5 * 2**23)
"""Addend that leaves the nearest integer in the low bits of the sum."""
_ROUND_BITS = np.int32(0x4B400000)
# ln 2 in two parts; the product of the first part and an exponent is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Cephes' polynomial for exp on [-ln 2 / 2, ln 2 / 2].
_C0 = np.float32(1.98756915e-4)
_C1 = np.float32(1.39819995e-3)
_C2 = np.float32(8.33345191e-3)
_C3 = np.float32(4.16657959e-2)
_C4 = np.float32(1.66666655e-1)
_C5 = np.float32(5.00000012e-1)
# Beyond these the power of two of the result would not be a normal float32.
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)


@njit(inline="always")
def _compute_exponential(x: Any) -> Any:
    """Return exp of a float32 with a relative error of 1e-7, the argument clamped to -87 .. 88."""
    x = min(max(x, _LOWEST), _HIGHEST)
    # x = exponent ln 2 + rest; the addend leaves the nearest integer in the low bits.
    shifted = multiply_add(x, _LOG2_E, _ROUND)
    exponent = shifted - _ROUND
    rest = multiply_add(exponent, -_LN2_LOW, multiply_add(exponent, -_LN2_HIGH, x))

    # Horner's scheme, in this order in every lane.
    y = multiply_add(_C0, rest, _C1)
    y = multiply_add(y, rest, _C2)
    y = multiply_add(y, rest, _C3)
    y = multiply_add(y, rest, _C4)
    y = multiply_add(y, rest, _C5)
    y = multiply_add(y, rest * rest, rest) + _ONE

    # 2^exponent, written into the bits of a float32.
    power = (np.float32(shifted).view(np.int32) - _ROUND_BITS + np.int32(127)) << np.int32(23)
    return y * np.int32(power).view(np.float32)


@_compile
def compute_gated(x: Any, linear: Any, cubic: Any, out: Any, begin: int, end: int) -> None:
    """Compute gate * sigmoid(linear gate + cubic gate^3) * up of groups begin to end; x is [groups,
    2, W], out [groups, W]."""
    for group in range(begin, end):
        for j in range(out.shape[1]):
            gate = x[group, 0, j]
            inner = gate * multiply_add(cubic, gate * gate, linear)
            out[group, j] = gate / (_ONE + _compute_exponential(-inner)) * x[group, 1, j]


@_compile
def compute_gated_backward(
    dout: Any, x: Any, linear: Any, cubic: Any, dx: Any, begin: int, end: int
) -> None:
    for group in range(begin, end):
        for j in range(dout.shape[1]):
            gate, up, d = x[group, 0, j], x[group, 1, j], dout[group, j]
            square = gate * gate
            sigmoid = _ONE / (
                _ONE + _compute_exponential(-gate * multiply_add(cubic, square, linear))
            )
            slope = gate * multiply_add(_THREE * cubic, square, linear)
            dx[group, 0, j] = d * up * sigmoid * (_ONE + slope * (_ONE - sigmoid))
            dx[group, 1, j] = d * gate * sigmoid


@_compile
def _round_up(count: int, tile: int) -> int:
    return (count + tile - 1) // tile * tile


@_compile
def _pad_to_tiles(x: Any) -> Any:
    """Return a copy of [n, D] with zeros up to whole tiles in both directions."""
    copy = np.zeros((_round_up(x.shape[0], COLUMNS), _round_up(x.shape[1], COLUMNS)), np.float32)
    copy[: x.shape[0], : x.shape[1]] = x
    return copy


@_compile
def _pack_rows(x: Any) -> Any:
    """Return [t, G, D] as rows [t G, D], with zeros up to whole tiles."""
    G = x.shape[1]
    num_rows = x.shape[0] * G
    rows = np.zeros((_round_up(num_rows, ROWS), _round_up(x.shape[2], COLUMNS)), np.float32)
    for row in range(num_rows):
        rows[row, : x.shape[2]] = x[row // G, row % G]
    return rows


@_compile
def _add_product(a: Any, b: Any, count: int, out: Any) -> None:
    """Add a[:, :count] b[:count] to `out` in whole tiles; the rows of b and `out` are
    contiguous.
    """
    for row in range(0, out.shape[0], ROWS):
        for column in range(0, out.shape[1], COLUMNS):
            add_tile(a, row, b, column, count, out)


@_compile
def _compute_softmax(s: Any, start: int, count: int, lanes: Any) -> Any:
    """Replace s[start:count] by exp(s - max), and the rest of the first and last lanes by 0; return
    the sum.
    """
    # Places outside take a score that is there, so that they do not change the maximum.
    width = _round_up(count, LANES)
    s[:start] = s[start]
    s[count:width] = s[start]
    for lane in range(LANES):
        lanes[lane] = s[lane]
    for first in range(LANES, width, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], s[first + lane])
    largest = lanes[0]
    for lane in range(1, LANES):
        largest = max(largest, lanes[lane])

    for j in range(width):
        s[j] = _compute_exponential(s[j] - largest)
    s[:start] = _ZERO
    s[count:width] = _ZERO

    # Sixteen partial sums, added in one fixed tree: the order does not depend on the width.
    for lane in range(LANES):
        lanes[lane] = s[lane]
    for first in range(LANES, width, LANES):
        for lane in range(LANES):
            lanes[lane] += s[first + lane]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@_compile
def _find_first_key(count: int, window: int) -> int:
    """Return the first of the latest `window` of `count` keys, rounded down to a tile."""
    return max(0, count - window) // COLUMNS * COLUMNS


@_compile
def _attend(q: Any, columns: Any, rows: Any, hidden: int, window: int, out: Any) -> None:
    """Attend from a segment's queries [t, G, D] of one group to its keys' columns and its values'
    rows.

    Args:
        columns, rows: [D, n] and [n, D] in whole tiles; those before the first window's tile are
        not read.
        hidden: number of keys before the first query's own.
        window: number of latest keys that a query sees, its own included.
        out: as `q`; overwritten.
    """
    G, D, x = q.shape[1], q.shape[2], _pack_rows(q)
    s = np.empty((ROWS, columns.shape[1]), np.float32)
    lanes, totals = np.empty(LANES, np.float32), np.empty(ROWS, np.float32)
    for top in range(0, q.shape[0] * G, ROWS):
        last, tile = min(top + ROWS, q.shape[0] * G) - 1, x[top : top + ROWS]
        # Keys beyond those that the tile's last query sees are not computed.
        seen = hidden + last // G + 1
        base = _find_first_key(hidden + top // G + 1, window)
        s[:] = _ZERO
        _add_product(tile, columns[:, base:], D, s[:, base : _round_up(seen, COLUMNS)])
        for row in range(ROWS):
            count = hidden + min(top + row, last) // G + 1
            totals[row] = _compute_softmax(
                s[row, base:], max(0, count - window - base), count - base, lanes
            )
            s[row, count:seen] = _ZERO
        # The tile of queries is used up, and takes the result.
        tile[:] = _ZERO
        _add_product(s[:, base:], rows[base:], seen - base, tile)
        for row in range(top, last + 1):
            to = out[row // G, row % G]
            for d in range(D):
                to[d] = tile[row - top, d] / totals[row - top]


@_compile
def attend_packed(
    q: Any, k: Any, v: Any, queries: Any, keys: Any, window: int, out: Any, begin: int, end: int
) -> None:
    """Compute tasks begin to end of S x K; task a K + h is group h of heads of segment a.

    Args:
        q: [T, H, D] float32, scaled.
        k, v: [N, K, D] float32.
        queries, keys: [S+1] offsets of the segments' queries and keys; the last query of a segment
            sees all its keys, the one before all but the last, and so on.
        window: number of the latest of these keys that a query sees.
        out: [T, H, D] float32.
    """
    K, G = k.shape[1], q.shape[1] // k.shape[1]
    for task in range(begin, end):
        # Copies in whole tiles, so that the products need no bounds checks.
        a, h = task // K, task % K
        columns = np.ascontiguousarray(_pad_to_tiles(k[keys[a] : keys[a + 1], h]).T)
        rows = _pad_to_tiles(v[keys[a] : keys[a + 1], h])
        tokens, heads = slice(queries[a], queries[a + 1]), slice(h * G, h * G + G)
        hidden = (keys[a + 1] - keys[a]) - (queries[a + 1] - queries[a])
        _attend(q[tokens, heads], columns, rows, hidden, window, out[tokens, heads])


@_compile
def attend_paged(
    q: Any, cache: Any, queries: Any, lengths: Any, tables: Any, B: int, window: int,
    out: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Compute `attend_packed` with the keys and values of a segment in blocks of a cache.

    Args:
        cache: [M, K, at least 2 B D] float32, or uint16 of bfloat16's bits: keys [D, B], values [B,
            D].
        lengths: [S] number of keys of each segment.
        tables: [S, largest number of blocks], the block of each B keys; not read before the window
            of a segment's first query.
    """
    K, D = cache.shape[1], q.shape[2]
    G, width = q.shape[1] // K, _round_up(_round_up(lengths.max(), B), COLUMNS)
    columns = np.zeros((_round_up(D, COLUMNS), width), np.float32)
    rows = np.zeros((width, _round_up(D, COLUMNS)), np.float32)
    for task in range(begin, end):
        a, h = task // K, task % K
        hidden = lengths[a] - (queries[a + 1] - queries[a])
        # Blocks before the window of the first query are not read.
        for first in range(_find_first_key(hidden + 1, window) // B * B, lengths[a], B):
            block, count = cache[tables[a, first // B], h], min(B, lengths[a] - first)
            for d in range(D):
                part, column = block[d * B : (d + 1) * B], columns[d, first : first + B]
                for j in range(B):
                    column[j] = read_number(part[j])
            # Only the keys that exist: an unused place of a block may hold anything, even NaN.
            for j in range(count):
                part, row = block[(B + j) * D : (B + j + 1) * D], rows[first + j]
                for d in range(D):
                    row[d] = read_number(part[d])
        tokens, heads = slice(queries[a], queries[a + 1]), slice(h * G, h * G + G)
        _attend(q[tokens, heads], columns, rows, hidden, window, out[tokens, heads])


@_compile
def _compute_softmax_gradient(p: Any, s: Any, count: int, total: Any, lanes: Any) -> None:
    """Turn exponentials p into weights, and gradients s of the weights into gradients of the
    scores.
    """
    for j in range(count):
        p[j] /= total
    for lane in range(LANES):
        lanes[lane] = _ZERO
    for first in range(0, count, LANES):
        for lane in range(min(LANES, count - first)):
            lanes[lane] += p[first + lane] * s[first + lane]
    mean = _ZERO
    for lane in range(LANES):
        mean += lanes[lane]
    for j in range(count):
        s[j] = p[j] * (s[j] - mean)
    p[count:], s[count:] = _ZERO, _ZERO


@_compile
def attend_packed_backward(
    dout: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: int,
    dq: Any, dk: Any, dv: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Compute the gradients of `attend_packed`'s inputs, in their shapes."""
    K, D = k.shape[1:]
    G = q.shape[1] // K
    lanes = np.empty(LANES, np.float32)
    for task in range(begin, end):
        a, h = task // K, task % K
        num_tokens, num_keys = queries[a + 1] - queries[a], keys[a + 1] - keys[a]
        k_rows, v_rows = (
            _pad_to_tiles(k[keys[a] : keys[a + 1], h]),
            _pad_to_tiles(v[keys[a] : keys[a + 1], h]),
        )
        k_columns, v_columns = np.ascontiguousarray(k_rows.T), np.ascontiguousarray(v_rows.T)
        dk_rows, dv_rows = np.zeros((2, *k_rows.shape), np.float32)
        # The order of blocks and of heads fixes the order of each key's sum.
        for top in range(queries[a], queries[a + 1], BLOCK_TOKENS):
            tokens = slice(top, min(top + BLOCK_TOKENS, queries[a + 1]))
            heads, size = slice(h * G, h * G + G), tokens.stop - top
            x, dx = _pack_rows(q[tokens, heads]), _pack_rows(dout[tokens, heads])
            y = np.zeros(x.shape, np.float32)
            p, s = np.zeros((2, len(x), len(k_rows)), np.float32)
            first = num_keys - num_tokens + top - queries[a] + 1
            for row in range(0, size * G, ROWS):
                # The scores are computed again: the forward keeps none.
                four, last = slice(row, row + ROWS), min(row + ROWS, size * G) - 1
                seen = first + last // G
                base, width = _find_first_key(first + row // G, window), _round_up(seen, COLUMNS)
                _add_product(x[four], k_columns[:, base:], D, p[four, base:width])
                _add_product(dx[four], v_columns[:, base:], D, s[four, base:width])
                for i in range(row, row + ROWS):
                    count = first + min(i, last) // G - base
                    total = _compute_softmax(p[i, base:], max(0, count - window), count, lanes)
                    _compute_softmax_gradient(p[i, base:], s[i, base:], count, total, lanes)
                _add_product(s[four, base:], k_rows[base:], seen - base, y[four])
            for row in range(size * G):
                dq[top + row // G, h * G + row % G] = y[row, :D]
            # A key's gradient is a sum over the queries of all heads of its group.
            seen = _round_up(first + size - 1, ROWS)
            for g in range(G):
                _add_product(s[g : size * G : G].T, x[g::G], size, dk_rows[:seen])
                _add_product(p[g : size * G : G].T, dx[g::G], size, dv_rows[:seen])
        dk[keys[a] : keys[a + 1], h] = dk_rows[:num_keys, :D]
        dv[keys[a] : keys[a + 1], h] = dv_rows[:num_keys, :D]
