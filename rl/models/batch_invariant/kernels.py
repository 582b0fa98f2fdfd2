"""Attention and SwiGLU whose bits depend on no batch, compiled by numba.

A query's scores are chains over the head's dims, its softmax sums sixteen partial sums in
one fixed tree, its output is a chain over its keys in order of position. Keys that a tile has beyond
a query's own get weight 0. So a query's result is the same whether it comes with its whole
sequence, with a part of it, or alone over a cache.

Queries come in rows: row (i, g) of key-value head h is query head h G + g of token i.

Shape legend: T tokens, N keys, S segments, H query heads, K key-value heads, G = H / K, D head size,
M blocks of a cache, B keys of a block, L keys of one segment, rounded up to whole tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rl.models.batch_invariant.simd import COLUMNS, LANES, ROWS, add_products, exponential

_ZERO = np.float32(0.0)
_LANES, _COLUMNS, _ROWS = LANES, COLUMNS, ROWS


@njit(inline="always")
def _softmax(s: Any, count: int, width: int, lanes: Any) -> Any:
    """exp(s - max) in place of s[start : count], 0 from there to `width`; their sum."""
    for j in range(count, width):
        s[j] = s[0]
    for lane in range(_LANES):
        lanes[lane] = s[lane]
    for first in range(_LANES, width, _LANES):
        for lane in range(_LANES):
            lanes[lane] = max(lanes[lane], s[first + lane])
    largest = lanes[0]
    for lane in range(1, _LANES):
        largest = max(largest, lanes[lane])
    for j in range(width):
        s[j] = exponential(s[j] - largest)
    for j in range(count, width):
        s[j] = _ZERO
    for lane in range(_LANES):
        lanes[lane] = s[lane]
    for first in range(_LANES, width, _LANES):
        for lane in range(_LANES):
            lanes[lane] += s[first + lane]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@njit(inline="always")
def _tiles(count: int) -> int:
    return (count + _COLUMNS - 1) // _COLUMNS * _COLUMNS


@njit(inline="always")
def _row(row: int, last: int, first: int, h: int, H: int, G: int, D: int) -> int:
    """Offset in [T, H, D] of a row of head h of the tokens from `first` on; after the last, of the last."""
    row = min(row, last)
    return ((first + row // G) * H + h * G + row % G) * D


@njit(inline="always")
def _clear(x: Any, start: int, count: int) -> None:
    # Places within a slice start at 0, or the compiler, which cannot know that they are not negative,
    # makes no vectors.
    part = x[start : start + count]
    for j in range(count):
        part[j] = _ZERO


@njit(inline="always")
def _rows(row: int, last: int, first: int, h: int, H: int, G: int, D: int) -> Any:
    """`_row` of the four rows of a tile."""
    return (
        _row(row, last, first, h, H, G, D),
        _row(row + 1, last, first, h, H, G, D),
        _row(row + 2, last, first, h, H, G, D),
        _row(row + 3, last, first, h, H, G, D),
    )


@njit(inline="always")
def _score(q: Any, rows: Any, columns: Any, start: int, step: int, D: int, s: Any, c: int, L: int) -> None:
    """Products of four queries and the tile of keys from c on, into the rows of s, L apart."""
    for r in range(_ROWS):
        _clear(s, r * L + c, _COLUMNS)
    add_products(q, rows, 1, columns, start, step, D, s, (c, L + c, 2 * L + c, 3 * L + c))


@njit(inline="always")
def _softmax_rows(s: Any, L: int, row: int, last: int, hidden: int, G: int, lanes: Any) -> Any:
    """`_softmax` of four rows, each of as many keys as it sees; their sums."""
    width = _tiles(hidden + min(row + 3, last) // G + 1)
    return (
        _softmax(s[:L], hidden + row // G + 1, width, lanes),
        _softmax(s[L:], hidden + min(row + 1, last) // G + 1, width, lanes),
        _softmax(s[2 * L :], hidden + min(row + 2, last) // G + 1, width, lanes),
        _softmax(s[3 * L :], hidden + min(row + 3, last) // G + 1, width, lanes),
    )


@njit(inline="always")
def _divide_rows(out: Any, rows: Any, totals: Any, row: int, last: int, D: int) -> None:
    """Each row once: in the last tile of a segment rows may be the same."""
    for r in range(min(_ROWS, last - row + 1)):
        part = out[rows[r] : rows[r] + D]
        for d in range(D):
            part[d] /= totals[r]


@njit(nogil=True, cache=True, error_model="numpy")
def attend_packed(
    q: Any, k: Any, v: Any, queries: Any, keys: Any, shape: Any, out: Any, begin: int, end: int
) -> None:
    """Tasks begin to end, of S x K: task a K + h is head h of segment a.

    Args:
        q: [T, H, D] float32, flat, scaled.
        k: [K, D, N + COLUMNS] float32, flat; the last columns are of no key.
        v: [N, K, D] float32, flat.
        queries: [S+1] offsets of the segments' queries, and `keys` of their keys; the last query of a
            segment sees all its keys, the one before all but the last, and so on.
        shape: H, K, D, and the columns of k.
        out: [T, H, D] float32, flat, is set.
    """
    H, K, D, width = shape
    G = H // K
    longest = 0
    for a in range(begin // K, (end + K - 1) // K):
        longest = max(longest, keys[a + 1] - keys[a])
    L = _tiles(longest)
    s, lanes = np.empty(_ROWS * L, np.float32), np.empty(_LANES, np.float32)
    for task in range(begin, end):
        a, h = task // K, task % K
        first, first_key = queries[a], keys[a]
        hidden = (keys[a + 1] - first_key) - (queries[a + 1] - first)
        last = (queries[a + 1] - first) * G - 1
        for row in range(0, last + 1, _ROWS):
            rows = _rows(row, last, first, h, H, G, D)
            most = hidden + min(row + 3, last) // G + 1
            for c in range(0, most, _COLUMNS):
                _score(q, rows, k, h * D * width + first_key + c, width, D, s, c, L)
            totals = _softmax_rows(s, L, row, last, hidden, G, lanes)
            for r in range(_ROWS):
                _clear(out, rows[r], D)
            for d in range(0, D, _COLUMNS):
                to = (rows[0] + d, rows[1] + d, rows[2] + d, rows[3] + d)
                start = (first_key * K + h) * D + d
                add_products(s, (0, L, 2 * L, 3 * L), 1, v, start, K * D, most, out, to)
            _divide_rows(out, rows, totals, row, last, D)


@njit(nogil=True, cache=True, error_model="numpy")
def attend_paged(
    q: Any, cache: Any, queries: Any, lengths: Any, tables: Any, shape: Any, out: Any, begin: int, end: int
) -> None:
    """As `attend_packed`, with the keys and values of a segment in blocks of a cache.

    Args:
        cache: [M, K, 2, B D] float32, or uint16 of bfloat16's bits, flat: keys [D, B], values [B, D].
        queries: [S+1] offsets; `lengths` [S] are the segments' keys.
        tables: [S, most blocks], the block of each B keys.
        shape: H, K, D, B.
    """
    H, K, D, B = shape
    G = H // K
    longest = 0
    for a in range(begin // K, (end + K - 1) // K):
        longest = max(longest, lengths[a])
    L = _tiles(longest)
    s, lanes = np.empty(_ROWS * L, np.float32), np.empty(_LANES, np.float32)
    for task in range(begin, end):
        a, h = task // K, task % K
        first = queries[a]
        hidden = lengths[a] - (queries[a + 1] - first)
        last = (queries[a + 1] - first) * G - 1
        for row in range(0, last + 1, _ROWS):
            rows = _rows(row, last, first, h, H, G, D)
            most = hidden + min(row + 3, last) // G + 1
            for c in range(0, most, _COLUMNS):
                block = (tables[a, c // B] * K + h) * 2 * B * D
                _score(q, rows, cache, block + c % B, B, D, s, c, L)
            totals = _softmax_rows(s, L, row, last, hidden, G, lanes)
            for r in range(_ROWS):
                _clear(out, rows[r], D)
            for c in range(0, most, B):
                values = ((tables[a, c // B] * K + h) * 2 + 1) * B * D
                weights = (c, L + c, 2 * L + c, 3 * L + c)
                for d in range(0, D, _COLUMNS):
                    to = (rows[0] + d, rows[1] + d, rows[2] + d, rows[3] + d)
                    add_products(s, weights, 1, cache, values + d, D, min(B, most - c), out, to)
            _divide_rows(out, rows, totals, row, last, D)


@njit(nogil=True, cache=True, error_model="numpy")
def store_paged(k: Any, v: Any, slots: Any, shape: Any, cache: Any) -> None:
    """Write keys and values [T, K, D] into the cache of `attend_paged`, a token's at its slot.

    A slot is block B + place; below 0 there is none.
    """
    _, K, D, B = shape
    for t in range(slots.shape[0]):
        if slots[t] < 0:
            continue
        block, place = slots[t] // B, slots[t] % B
        for h in range(K):
            start = (block * K + h) * 2 * B * D
            for d in range(D):
                cache[start + d * B + place] = k[(t * K + h) * D + d]
            start += B * D + place * D
            for d in range(D):
                cache[start + d] = v[(t * K + h) * D + d]
