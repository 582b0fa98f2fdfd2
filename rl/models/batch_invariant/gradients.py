"""Gradients of the kernels in `kernels.py`: each number in one fixed order too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rl.models.batch_invariant.kernels import _clear, _row, _rows, _score, _softmax, _tiles
from rl.models.batch_invariant.simd import COLUMNS, LANES, ROWS, add_products, exponential

BLOCK_ROWS = 64
"""Rows whose weights are held at a time; a multiple of ROWS."""

_ONE = np.float32(1.0)
_LANES, _COLUMNS, _ROWS, _BLOCK_ROWS = LANES, COLUMNS, ROWS, BLOCK_ROWS


@njit(inline="always")
def _products(
    x: Any, row: int, last: int, first: int, h: int, H: int, G: int, D: int,
    columns: Any, start: int, width: int, out: Any, place: int, L: int, most: int,
) -> None:  # fmt: skip
    """Rows row to row + 3 of x times columns, into rows of `out` from `place`, L apart."""
    rows = _rows(row, last, first, h, H, G, D)
    for c in range(0, most, _COLUMNS):
        _score(x, rows, columns, start + c, width, D, out, place + c, L)


@njit(inline="always")
def _softmax_gradient(p: Any, s: Any, count: int, total: Any, width: int, lanes: Any) -> None:
    """p: exponentials, become weights. s: gradients of the weights, become those of the scores."""
    for j in range(count):
        p[j] /= total
    _clear(p, count, width - count)
    _clear(s, count, width - count)
    _clear(lanes, 0, _LANES)
    for first in range(0, _tiles(count), _LANES):
        for lane in range(_LANES):
            lanes[lane] += p[first + lane] * s[first + lane]
    mean = np.float32(0.0)
    for lane in range(_LANES):
        mean += lanes[lane]
    for j in range(count):
        s[j] = p[j] * (s[j] - mean)


@njit(inline="always")
def _add_to_queries(
    slopes: Any, place: int, L: int, k: Any, start: int, step: int, count: int, dq: Any, rows: Any, D: int
) -> None:
    """dq[row] += sum over keys of slopes[row, key] k[key], of a tile's four rows."""
    for d in range(0, D, _COLUMNS):
        to = (rows[0] + d, rows[1] + d, rows[2] + d, rows[3] + d)
        of = (place, place + L, place + 2 * L, place + 3 * L)
        add_products(slopes, of, 1, k, start + d, step, count, dq, to)


@njit(inline="always")
def _add_to_keys(
    weights: Any, L: int, rows: int, most: int, G: int,
    x: Any, x_start: int, x_step: int, D: int, out: Any, out_start: int, out_step: int,
) -> None:  # fmt: skip
    """out[j] += sum over the block's rows of weights[row, j] x[row], for the first `most` keys."""
    for j in range(0, most, _ROWS):
        j1, j2, j3 = min(j + 1, most - 1), min(j + 2, most - 1), min(j + 3, most - 1)
        places = (
            out_start + j * out_step, out_start + j1 * out_step,
            out_start + j2 * out_step, out_start + j3 * out_step,
        )  # fmt: skip
        for d in range(0, D, _COLUMNS):
            to = (places[0] + d, places[1] + d, places[2] + d, places[3] + d)
            for g in range(G):
                at = g * L
                add_products(
                    weights, (at + j, at + j1, at + j2, at + j3), G * L,
                    x, x_start + g * D + d, x_step, rows // G, out, to,
                )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def attend_packed_backward(
    dout: Any, q: Any, k: Any, k_rows: Any, v: Any, queries: Any, keys: Any, shape: Any,
    dq: Any, dk: Any, dv: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Gradients of `attend_packed`'s inputs; all flat and float32.

    Args:
        dout: [T, H, D].
        k: [K, D, N + COLUMNS], as there; so is v here.
        k_rows: [N, K, D], the keys once more.
        dq: [T, H, D], zeros, is added to; so are dk and dv, [N, K, D].
    """
    H, K, D, width = shape
    G = H // K
    block = _BLOCK_ROWS // _ROWS * G * _ROWS
    longest = 0
    for a in range(begin // K, (end + K - 1) // K):
        longest = max(longest, keys[a + 1] - keys[a])
    L = _tiles(longest)
    p, s = np.empty(block * L, np.float32), np.empty(block * L, np.float32)
    lanes = np.empty(_LANES, np.float32)
    for task in range(begin, end):
        a, h = task // K, task % K
        first, first_key = queries[a], keys[a]
        hidden = (keys[a + 1] - first_key) - (queries[a + 1] - first)
        last = (queries[a + 1] - first) * G - 1
        column, key = h * D * width + first_key, (first_key * K + h) * D
        for top in range(0, last + 1, block):
            bottom = min(top + block - 1, last)
            width_here = _tiles(hidden + bottom // G + 1)
            for row in range(top, bottom + 1, _ROWS):
                place = (row - top) * L
                most = hidden + min(row + 3, last) // G + 1
                _products(q, row, last, first, h, H, G, D, k, column, width, p, place, L, most)
                _products(dout, row, last, first, h, H, G, D, v, column, width, s, place, L, most)
                for r in range(row, row + _ROWS):
                    weights, slopes = p[(r - top) * L :], s[(r - top) * L :]
                    seen = hidden + min(r, last) // G + 1
                    total = _softmax(weights, seen, _tiles(most), lanes)
                    _softmax_gradient(weights, slopes, seen, total, width_here, lanes)
                rows4 = _rows(row, last, first, h, H, G, D)
                _add_to_queries(s, place, L, k_rows, key, K * D, most, dq, rows4, D)
            rows, seen = bottom - top + 1, hidden + bottom // G + 1
            x_start = _row(top, last, first, h, H, G, D)
            _add_to_keys(s, L, rows, seen, G, q, x_start, H * D, D, dk, key, K * D)
            _add_to_keys(p, L, rows, seen, G, dout, x_start, H * D, D, dv, key, K * D)


@njit(nogil=True, cache=True, error_model="numpy")
def swiglu(x: Any, out: Any, begin: int, end: int) -> None:
    """Groups begin to end: silu of a group's gate times its up; x is [groups, 2, W], out [groups, W]."""
    for group in range(begin, end):
        for j in range(out.shape[1]):
            gate = x[group, 0, j]
            out[group, j] = gate / (_ONE + exponential(-gate)) * x[group, 1, j]


@njit(nogil=True, cache=True, error_model="numpy")
def swiglu_backward(dout: Any, x: Any, dx: Any, begin: int, end: int) -> None:
    for group in range(begin, end):
        for j in range(dout.shape[1]):
            gate, up, d = x[group, 0, j], x[group, 1, j], dout[group, j]
            sigmoid = _ONE / (_ONE + exponential(-gate))
            dx[group, 0, j] = d * up * sigmoid * (_ONE + gate * (_ONE - sigmoid))
            dx[group, 1, j] = d * gate * sigmoid
