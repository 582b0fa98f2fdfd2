"""The batch-invariant kernels as PyTorch functions, with gradients, on several threads.

Shapes are as in `kernels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.models.batch_invariant import kernels
from rl.utils.tensor_memory import get_memory

UNLIMITED = 2**40
"""Window without effect."""
SMALLEST_SHARE = 2_000_000
"""Multiply-adds below which a second thread does not pay off: a few tenths of a millisecond."""
_NUMPY_DTYPES = {torch.float32: "f4", torch.bfloat16: "u2"}


def attend(
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    queries_S: np.ndarray,
    keys_S: np.ndarray,
    *,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within segments, [T, H, D].

    Args:
        queries_S, keys_S: [S+1] int64 offsets of the segments' queries and keys. The last query of
            a segment sees all of its keys, the one before all but the last, and so on.
        window: number of the latest of these keys that a query sees; None for all.
    """
    # Scaled outside the kernel, as over a cache: the same product with the same rounding.
    scaled_THD = q_THD.float() * q_THD.size(-1) ** -0.5
    # Compiled kernels have no optional arguments: no window is a window longer than any sequence.
    out: Tensor = _Attention.apply(
        scaled_THD, k_NKD.float(), v_NKD.float(), queries_S, keys_S, window or UNLIMITED
    )
    return out.to(q_THD.dtype)


class _Attention(torch.autograd.Function):
    """`kernels.attend_packed` of float32 tensors, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries_S: np.ndarray,
        keys_S: np.ndarray,
        window: int,
    ) -> Tensor:
        out = torch.empty(q.shape)
        inputs = _to_array(q), _to_array(k), _to_array(v)
        arguments = (*inputs, queries_S, keys_S, window, _to_array(out))
        work = _count_work(queries_S, np.diff(keys_S), q.size(1), q.size(2), k.size(1))
        share(lambda begin, end: kernels.attend_packed(*arguments, begin, end), work)
        ctx.save_for_backward(q, k, v)
        ctx.segments, ctx.work = (queries_S, keys_S, window), work
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        outputs = [torch.empty(x.shape) for x in inputs]
        arguments = (*map(_to_array, (grads[0], *inputs)), *ctx.segments, *map(_to_array, outputs))
        share(lambda begin, end: kernels.attend_packed_backward(*arguments, begin, end), ctx.work)
        return *outputs, None, None, None


def attend_to_cache(
    q_THD: Tensor,
    cache: Tensor,
    *,
    queries_S: Tensor,
    lengths_S: Tensor,
    tables: Tensor,
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """Compute `attend` with keys and values from the blocks of a cache, [T, H, D], without
    gradient.

    Args:
        cache: written by `store_in_cache`.
        queries_S: [S+1] offsets of the segments' queries.
        lengths_S: [S] number of keys of each segment.
        tables: [S, largest number of blocks], the blocks of each segment in order.
    """
    q = q_THD.float() * q_THD.size(-1) ** -0.5
    out = torch.zeros(q.shape)
    queries, lengths = queries_S.numpy().astype(np.int64), lengths_S.numpy().astype(np.int64)
    sizes = block_size, window or UNLIMITED
    arguments = (
        _to_array(q),
        _to_blocks(cache),
        queries,
        lengths,
        tables.numpy(),
        *sizes,
        _to_array(out),
    )
    work = _count_work(queries, lengths, q.size(1), q.size(2), cache.size(1))
    share(lambda begin, end: kernels.attend_paged(*arguments, begin, end), work)
    return out.to(q_THD.dtype)


def store_in_cache(
    k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, *, slots_T: Tensor, block_size: int
) -> None:
    """Write each token's key and value to its slot (block x block size + position) unless it is
    negative.

    Args:
        cache: [blocks, K, ...] with room for 2 x block size x D numbers each, contiguous, in the
            dtype of keys and values: keys [D, block size], then values [block size, D].
    """
    # vLLM gives padding tokens a negative slot.
    is_stored_T = slots_T >= 0
    blocks, places = slots_T[is_stored_T] // block_size, slots_T[is_stored_T] % block_size
    shape, size = (k_TKD.size(2), block_size), k_TKD.size(2) * block_size
    content = cache.view(*cache.shape[:2], -1)  # never a copy
    content[..., :size].unflatten(-1, shape)[blocks, :, :, places] = k_TKD[is_stored_T]
    content[..., size : 2 * size].unflatten(-1, shape[::-1])[blocks, :, places] = v_TKD[is_stored_T]


class _Gated(torch.autograd.Function):
    """`kernels.compute_gated` of [groups, 2, W] float32, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: tuple[float, float]) -> Tensor:
        out = torch.empty(x.size(0), x.size(-1))
        arguments = _to_array(x), *map(np.float32, factors), _to_array(out)
        share(
            lambda begin, end: kernels.compute_gated(*arguments, begin, end), _count_row_work(out)
        )
        ctx.save_for_backward(x)
        ctx.factors = factors
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape)
        arguments = _to_array(grads[0]), _to_array(x), *map(np.float32, ctx.factors), _to_array(dx)
        share(
            lambda begin, end: kernels.compute_gated_backward(*arguments, begin, end),
            _count_row_work(grads[0]),
        )
        return dx, None


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, K * W], from gates and ups [T, K, 2, W]."""
    return _apply_gate(gate_up, 1.0, 0.0)


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up as `swiglu`, with the approximation by tanh, which is a sigmoid of
    twice its argument.
    """
    factor = 2.0 * (2.0 / math.pi) ** 0.5
    return _apply_gate(gate_up, factor, 0.044715 * factor)


def _apply_gate(gate_up: Tensor, linear: float, cubic: float) -> Tensor:
    out: Tensor = _Gated.apply(gate_up.float().flatten(0, 1), (linear, cubic))
    return out.view(gate_up.size(0), -1).to(gate_up.dtype)


def load_kernels() -> None:
    """Load the compiled kernels of a training step; the first call of one takes 0.3 s."""
    offsets = np.array([0, 1])
    x_THD = torch.zeros(1, 1, 8, requires_grad=True)
    attend(x_THD, x_THD, x_THD, offsets, offsets).sum().backward()
    for activation in (swiglu, geglu):
        gate_up = torch.zeros(1, 1, 2, 8, requires_grad=True)
        activation(gate_up).sum().backward()


def share(run: Callable[[int, int], None], work: np.ndarray) -> None:
    """Call `run(begin, end)` for parts of the tasks on as many threads as PyTorch uses for the
    caller.

    The threads are our own, because PyTorch's cannot run numba kernels. Tasks do not depend on each
    other.

    Args:
        work: [tasks + 1] int64, multiply-adds up to each task.
    """
    num_tasks, total = len(work) - 1, int(work[-1])
    num_shares = max(1, min(torch.get_num_threads(), num_tasks, total // SMALLEST_SHARE))
    if num_shares == 1:
        run(0, num_tasks)
        return
    # Bounds where the work, not the number of tasks, is divided evenly.
    ends = np.searchsorted(work, total * np.arange(1, num_shares) // num_shares)
    bounds = [0, *ends.tolist(), num_tasks]
    pool = _get_threads(num_shares - 1)
    # Kernels release the interpreter's lock, so threads compute at the same time.
    others = [pool.submit(run, begin, end) for begin, end in pairwise(bounds[1:])]
    run(bounds[0], bounds[1])  # The caller computes too, rather than wait.
    for other in others:
        other.result()


@lru_cache(maxsize=4)
def _get_threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="batch-invariant")


def _count_work(
    queries_S: np.ndarray, lengths_S: np.ndarray, num_heads: int, head_dim: int, num_kv_heads: int
) -> np.ndarray:
    # Two products, with the keys and with the values, for each head of a group.
    per_segment = np.diff(queries_S) * lengths_S * (num_heads // num_kv_heads * 2 * head_dim)
    return np.concatenate(([0], np.repeat(per_segment, num_kv_heads).cumsum()))


def _count_row_work(rows: Tensor) -> np.ndarray:
    """Return the work of each row; an exponential counts as about ten multiply-adds."""
    return np.arange(rows.size(0) + 1) * (10 * rows.size(1))


def _to_array(x: Tensor) -> np.ndarray:
    """Return the tensor, or a contiguous copy, as an array; bfloat16 as its bits."""
    x = x.detach().contiguous()
    array: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def _to_blocks(cache: Tensor) -> np.ndarray:
    """Return [blocks, K, numbers of a block]; the tensor's memory can still be freed."""
    array = get_memory(cache, dtype=_NUMPY_DTYPES[cache.dtype])
    return array.reshape(cache.size(0), cache.size(1), -1)
