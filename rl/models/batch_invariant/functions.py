"""The batch-invariant kernels as PyTorch functions, with gradients, on several threads.

Shape legend: as in `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl.models.batch_invariant import gradients, kernels
from rl.models.batch_invariant.simd import COLUMNS
from rl.tensor_memory import memory_of

SMALLEST_SHARE = 2_000_000
"""Multiply-adds, a few tenths of a millisecond: less is not worth the wait for a second thread."""
_NUMPY_DTYPES = {torch.float32: "f4", torch.bfloat16: "u2"}


def attend(q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, queries_S: np.ndarray, keys_S: np.ndarray) -> Tensor:
    """[T, H, D], causal attention within segments.

    Args:
        queries_S: [S+1] int64, offsets of the segments' queries; `keys_S` those of their keys. The last
            query of a segment sees all of its keys, the one before all but the last, and so on.
    """
    head_dim = q_THD.size(-1)
    padding = -head_dim % COLUMNS
    q, k, v = (F.pad(x, (0, padding)) if padding else x for x in (q_THD, k_NKD, v_NKD))
    # Scaled outside, as it is over a cache: the same product, rounded the same way.
    out: Tensor = _Attention.apply(q.float() * head_dim**-0.5, k.float(), v.float(), queries_S, keys_S)
    return out[..., :head_dim].to(q_THD.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries_S: np.ndarray, keys_S: np.ndarray
    ) -> Tensor:
        shape, work = _shape(q, k), _work(queries_S, keys_S, q.size(1), q.size(2), k.size(1))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        arguments = (_flat(q), _flat(_columns(k)), _flat(v), queries_S, keys_S, shape, _flat(out))
        share(lambda begin, end: kernels.attend_packed(*arguments, begin, end), work)
        ctx.save_for_backward(q, k, v)
        ctx.segments = queries_S, keys_S
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        queries_S, keys_S = ctx.segments
        work = _work(queries_S, keys_S, q.size(1), q.size(2), k.size(1))
        dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
        arguments = (
            _flat(grads[0]), _flat(q), _flat(_columns(k)), _flat(k), _flat(_columns(v)), queries_S, keys_S,
            _shape(q, k), _flat(dq), _flat(dk), _flat(dv),
        )  # fmt: skip
        share(lambda begin, end: gradients.attend_packed_backward(*arguments, begin, end), work)
        return dq, dk, dv, None, None


def attend_to_cache(
    q_THD: Tensor, cache: Tensor, *, queries_S: Tensor, lengths_S: Tensor, tables: Tensor, block_size: int
) -> Tensor:
    """[T, H, D], as `attend`, with keys and values from the blocks of a cache; without gradient.

    Args:
        cache: of `store_in_cache`.
        queries_S: [S+1] offsets of the segments' queries.
        lengths_S: [S] keys of each segment.
        tables: [S, most blocks], the blocks that hold them in order.
    """
    head_dim = q_THD.size(-1)
    padding = -head_dim % COLUMNS
    q = (F.pad(q_THD, (0, padding)) if padding else q_THD).float() * head_dim**-0.5
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_kv_heads = cache.size(1)
    queries, lengths = (x.numpy().astype(np.int64) for x in (queries_S, lengths_S))
    work = _work(queries, np.concatenate(([0], lengths.cumsum())), q.size(1), q.size(2), num_kv_heads)
    shape = (q.size(1), num_kv_heads, q.size(2), block_size)
    arguments = (_flat(q), _flat(cache), queries, lengths, tables.numpy(), shape, _flat(out))
    share(lambda begin, end: kernels.attend_paged(*arguments, begin, end), work)
    return out[..., :head_dim].to(q_THD.dtype)


def store_in_cache(k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, *, slots_T: Tensor, block_size: int) -> None:
    """Put each token's key and value at its slot (block x block size + place), where that is not below 0.

    Args:
        cache: [blocks, K, ...] of 2 x block size x D numbers each, D a multiple of COLUMNS, contiguous, in
            the dtype of keys and values.
    """
    padding = -k_TKD.size(-1) % COLUMNS
    k, v = (F.pad(x, (0, padding)) if padding else x for x in (k_TKD, v_TKD))
    shape = (0, k.size(1), k.size(2), block_size)
    kernels.store_paged(_flat(k), _flat(v), slots_T.numpy(), shape, _flat(cache))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        width = x.size(-1)
        out = torch.empty((*x.shape[:-2], width))
        arguments = (_flat(x).reshape(-1, 2, width), _flat(out).reshape(-1, width))
        share(lambda begin, end: gradients.swiglu(*arguments, begin, end), _even(x, width))
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        width = x.size(-1)
        dx = torch.empty(x.shape)
        arguments = (
            _flat(grads[0]).reshape(-1, width),
            _flat(x).reshape(-1, 2, width),
            _flat(dx).reshape(-1, 2, width),
        )
        share(lambda begin, end: gradients.swiglu_backward(*arguments, begin, end), _even(x, width))
        return (dx,)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, K * W] of [T, K, 2, W]: silu of the gates times the ups."""
    out: Tensor = _SwiGLU.apply(gate_up.float())
    return out.flatten(1).to(gate_up.dtype)


def share(run: Callable[[int, int], None], work: np.ndarray) -> None:
    """`run(begin, end)` for parts of the tasks on the calling thread's number of threads.

    Not on PyTorch's own: kernels there are not ours to start. What a task computes depends on no other.

    Args:
        work: [tasks + 1] int64, multiply-adds up to each task.
    """
    num_tasks, total = len(work) - 1, int(work[-1])
    num_shares = max(1, min(torch.get_num_threads(), num_tasks, total // SMALLEST_SHARE))
    if num_shares == 1:
        run(0, num_tasks)
        return
    ends = np.searchsorted(work, total * np.arange(1, num_shares) // num_shares)
    bounds = [0, *(int(end) for end in ends), num_tasks]
    pool = _threads(num_shares - 1)
    others = [pool.submit(run, begin, end) for begin, end in pairwise(bounds[1:])]
    run(bounds[0], bounds[1])
    for other in others:
        other.result()


@lru_cache(maxsize=4)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="batch-invariant")


def _work(
    queries_S: np.ndarray, keys_S: np.ndarray, num_heads: int, head_dim: int, num_kv_heads: int
) -> np.ndarray:
    per_segment = np.diff(queries_S) * np.diff(keys_S) * (num_heads // num_kv_heads * 2 * head_dim)
    return np.concatenate(([0], np.repeat(per_segment, num_kv_heads).cumsum()))


def _even(x: Tensor, width: int) -> np.ndarray:
    """Of groups of `width` in [..., 2, width]; an exponential and its surroundings are about ten."""
    return np.arange(x.numel() // (2 * width) + 1) * (10 * width)


def _shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    return q.size(1), k.size(1), q.size(2), k.size(0) + COLUMNS


def _columns(x_NKD: Tensor) -> Tensor:
    """[K, D, N + COLUMNS], so that a tile of columns may reach beyond the last."""
    return F.pad(x_NKD.permute(1, 2, 0), (0, COLUMNS))


def _flat(x: Tensor) -> np.ndarray:
    """[elements] the memory of a tensor, or of a copy where it is not contiguous; bfloat16 as its bits."""
    return memory_of(x.detach().contiguous(), dtype=_NUMPY_DTYPES[x.dtype])


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """[S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
