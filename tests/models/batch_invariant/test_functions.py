"""Batch-invariant kernels, compared with plain PyTorch and with themselves in other batches.

Marked medium because numba compiles the kernels at their first use on a machine.
"""

import numpy as np
import pytest
import torch

from rl.models import decoder
from rl.models.batch_invariant.functions import (
    attend,
    attend_to_cache,
    geglu,
    store_in_cache,
    swiglu,
)
from rl.models.layers.attention import PackedAttention, SequenceLayout
from rl.utils.processes import use_threads

pytestmark = pytest.mark.medium

SHAPES = [(8, 4, 32), (6, 2, 16), (4, 4, 64), (3, 1, 8)]
"""Query heads, key-value heads, head size."""
LENGTHS = [46, 1, 3, 77, 64, 130]
BLOCK = 32


def offsets(lengths):
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def random_qkv(num_tokens, shape, dtype=torch.float32, seed=0):
    num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, head_dim, generator=generator).to(dtype) for n in heads]


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_its_gradients_equal_plain_attention_to_rounding(shape, window):
    q, k, v = (x.requires_grad_() for x in random_qkv(sum(LENGTHS), shape))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    out = attend(q, k, v, offsets(LENGTHS), offsets(LENGTHS), window=window)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = PackedAttention(window=window)(*exact, SequenceLayout.from_lengths(LENGTHS))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for grad, right in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_sequence_do_not_depend_on_the_batch_its_order_or_threads(num_threads):
    use_threads(num_threads)
    try:
        q, k, v = random_qkv(sum(LENGTHS), SHAPES[0])
        together = attend(q, k, v, offsets(LENGTHS), offsets(LENGTHS)).split(LENGTHS)
        parts = list(zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True))
        for (q, k, v), expected in zip(parts, together, strict=True):
            alone = offsets([len(expected)])
            assert torch.equal(attend(q, k, v, alone, alone), expected)
        turned = offsets(LENGTHS[::-1])
        q, k, v = (torch.cat(x) for x in zip(*parts[::-1], strict=True))
        backwards = attend(q, k, v, turned, turned)
        assert torch.equal(torch.cat(backwards.split(LENGTHS[::-1])[::-1]), torch.cat(together))
    finally:
        use_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "window"), [(SHAPES[0], None), (SHAPES[1], None), (SHAPES[1], 21)], ids=str
)
def test_paged_cache_gives_the_bits_of_packed_sequences(dtype, shape, window):
    lengths = [46, 5, 150, 33]
    q, k, v = random_qkv(sum(lengths), shape, dtype)
    whole = attend(q, k, v, offsets(lengths), offsets(lengths), window=window).split(lengths)
    padded_dim = -(-shape[2] // 32) * 32
    # Unwritten slots hold NaN; blocks are in random order.
    cache = torch.full((16, shape[1], BLOCK, 2 * padded_dim), torch.nan, dtype=dtype)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2)).int()
    unused = order[3]
    tables = torch.stack([order[4 * i : 4 * i + 4] for i in (0, 1, 2, 3)])
    tables = torch.cat((tables, tables[:, :1]), dim=1)
    tables[2] = torch.tensor(
        [*order[8:12], order[6]]
    )  # the fifth block is one of the second sequence's
    places = [torch.arange(n) for n in lengths]
    slots = [tables[i][p // BLOCK].long() * BLOCK + p % BLOCK for i, p in enumerate(places)]
    parts = [list(x.split(lengths)) for x in (q, k, v)]
    for first, last in ((0.0, 0.4), (0.4, 0.9), (0.9, 1.0)):
        # Each step adds tokens to every sequence.
        begins, ends = ([round(n * x) for n in lengths] for x in (first, last))
        some = [torch.cat([x[b:e] for x, b, e in zip(p, begins, ends, strict=True)]) for p in parts]
        now = torch.cat([x[b:e] for x, b, e in zip(slots, begins, ends, strict=True)])
        store_in_cache(some[1], some[2], cache, slots_T=now, block_size=BLOCK)
        counts = [e - b for b, e in zip(begins, ends, strict=True)]
        for row, begin in enumerate(begins if window else []):
            # The engine frees the blocks before a window and points at one that may hold anything.
            tables[row, : max(0, begin + 1 - window) // BLOCK] = unused
        out = attend_to_cache(
            some[0],
            cache,
            queries_S=torch.from_numpy(offsets(counts)),
            lengths_S=torch.tensor(ends, dtype=torch.int32),
            tables=tables.contiguous(),
            block_size=BLOCK,
            window=window,
        )
        expected = torch.cat([x[b:e] for x, b, e in zip(whole, begins, ends, strict=True)])
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("ours", "plain"), [(swiglu, decoder.swiglu), (geglu, decoder.geglu)])
def test_activation_equals_the_plain_one_and_its_rows_do_not_depend_on_the_batch(ours, plain):
    x = (
        torch.randn(37, 4, 2, 23, generator=torch.Generator().manual_seed(0))
        .mul_(4)
        .requires_grad_()
    )
    dout = torch.randn(37, 92, generator=torch.Generator().manual_seed(1))
    out, expected = ours(x), plain(x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(grad, *torch.autograd.grad(expected, x, dout), rtol=1e-5, atol=1e-5)
    for row in (0, 17, 36):
        assert torch.equal(ours(x[row : row + 1]), out[row : row + 1])
    extreme = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]).view(1, 1, 1, 5).repeat(1, 1, 2, 1)
    extreme[:, :, 1] = 1.0
    torch.testing.assert_close(ours(extreme), plain(extreme), atol=1e-30, rtol=1e-6)


def test_used_cache_can_free_its_memory():
    dtype = torch.bfloat16
    shape = (4, 2, 32)
    q, k, v = random_qkv(3, shape, dtype)
    cache = torch.zeros(2, 2, 2 * BLOCK * 32, dtype=dtype)
    store_in_cache(k, v, cache, slots_T=torch.arange(3), block_size=BLOCK)
    attend_to_cache(
        q,
        cache,
        queries_S=torch.tensor([0, 3]),
        lengths_S=torch.tensor([3]),
        tables=torch.zeros(1, 1, dtype=torch.int32),
        block_size=BLOCK,
    )
    cache.untyped_storage().resize_(0)
    assert cache.untyped_storage().nbytes() == 0
