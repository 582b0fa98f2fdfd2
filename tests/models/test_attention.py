"""Attention over a packed batch, compared with a textbook form of one sequence and head at a
time.
"""

import pytest
import torch

from rl.distributed.compile import CompileConfig, compile_blocks
from rl.distributed.context_parallel import ContextParallel
from rl.models.batch_invariant.model import InvariantAttention
from rl.models.layers.attention import AttentionBySegment, PackedAttention, SequenceLayout


def textbook(inputs, lengths, window=10**6):
    q_THD, k_TKD, v_TKD = inputs
    group_size = q_THD.size(1) // k_TKD.size(1)
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        heads = []
        for h in range(q_THD.size(1)):
            q, k, v = q_THD[rows, h], k_TKD[rows, h // group_size], v_TKD[rows, h // group_size]
            seen = torch.ones(length, length).tril().triu(1 - window).bool()
            scores = (q @ k.T / q.size(-1) ** 0.5).masked_fill(~seen, -1e30)
            heads.append(scores.softmax(-1) @ v)
        parts.append(torch.stack(heads, dim=1))
    return torch.cat(parts)


def random_qkv(num_tokens, num_kv_heads=2, *, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    shapes = [(num_tokens, n, head_dim) for n in heads]
    return [
        torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def assert_same_values_and_gradients(actual, expected, inputs):
    torch.testing.assert_close(actual, expected)
    pull = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=actual.dtype)
    gradients = (torch.autograd.grad(out, inputs, pull) for out in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[3, 1, 40], [96], [5, 97], [20, 19, 18, 17, 2, 2]])
def test_packed_attention_and_its_gradient_equal_the_textbook(lengths, num_kv_heads, window):
    inputs = random_qkv(sum(lengths), num_kv_heads)
    out = PackedAttention(window=window)(*inputs, SequenceLayout.from_lengths(lengths))
    assert_same_values_and_gradients(out, textbook(inputs, lengths, window or 10**6), inputs)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_keys", [[3, 1, 14], [96, 3]])
@pytest.mark.parametrize("limit", [0, 10**6])
def test_single_queries_see_the_last_keys(num_keys, window, limit, monkeypatch):
    monkeypatch.setattr("rl.models.layers.attention.MAX_PADDED_KEYS", limit)
    ends = torch.tensor(num_keys).cumsum(0)
    q, k, v = random_qkv(sum(num_keys))
    layout = SequenceLayout.of_single_queries(
        [torch.arange(e - n, e).numpy() for e, n in zip(ends, num_keys, strict=True)]
    )
    out = PackedAttention(window=window)(q[ends - 1], k, v, layout)
    torch.testing.assert_close(out, textbook((q, k, v), num_keys, window or 10**6)[ends - 1])


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[3, 1, 44], [96], [5, 91], [13] * 7 + [5]])
def test_attention_of_all_context_parallel_ranks_equals_the_textbook(lengths, num_ranks, window):
    q, k, v = random_qkv(sum(lengths))
    contexts = [
        ContextParallel(rank=rank, num_ranks=num_ranks, group="none") for rank in range(num_ranks)
    ]
    indices = [context.token_indices(len(q)) for context in contexts]
    gathered = torch.cat(indices)
    parts = []
    for mine, context in zip(indices, contexts, strict=True):
        share = SequenceLayout.of_rank(lengths, context=context)
        parts.append(AttentionBySegment(window=window)(q[mine], k[gathered], v[gathered], share))
    out = torch.cat(parts)[contexts[0].places(len(q))]
    assert_same_values_and_gradients(out, textbook((q, k, v), lengths, window or 10**6), (q, k, v))


# The batch-invariant kernels are compiled at their first use.
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "core", ["packed", pytest.param("batch-invariant", marks=pytest.mark.medium)]
)
def test_attention_after_a_shared_prefix_equals_the_textbook_over_whole_sequences(core, window):
    # Two sequences of 7 + 5 and 7 + 1 tokens share the first 7; one of 4 is alone.
    rows, lengths = [*range(12), *range(7), 12, *range(13, 17)], [12, 8, 4]
    segments = SequenceLayout.after_prefixes([7, 5, 1, 4], [(0, 0), (0, 7), (0, 7), (0, 0)])
    attention = (PackedAttention if core == "packed" else InvariantAttention)(window=window)
    inputs = random_qkv(17, head_dim=16, dtype=torch.float32)
    whole = textbook([x[rows] for x in inputs], lengths, window or 10**6)
    out = attention(*inputs, segments)
    torch.testing.assert_close(out[rows], whole)
    assert_same_values_and_gradients(out, whole[[rows.index(row) for row in range(17)]], inputs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "core", ["packed", pytest.param("batch-invariant", marks=pytest.mark.medium)]
)
def test_attention_along_paths_equals_the_textbook_over_whole_sequences(core, window):
    # 9 tokens; 6 of them and 3 others; those, one of the three and 4 others.
    rows = [*range(9), *range(6), 9, 10, 11, *range(6), 9, *range(12, 16)]
    segments = SequenceLayout.after_paths([9, 3, 4], [(), [(0, 6)], [(0, 6), (9, 10)]])
    inputs = random_qkv(16, head_dim=16, dtype=torch.float32)
    whole = textbook([x[rows] for x in inputs], [9, 9, 11], window or 10**6)
    attention = (PackedAttention if core == "packed" else InvariantAttention)(window=window)
    out = attention(*inputs, segments)
    torch.testing.assert_close(out[rows], whole)
    assert_same_values_and_gradients(out, whole[[rows.index(row) for row in range(16)]], inputs)


def test_compiled_attention_equals_eager_attention():
    inputs = random_qkv(46, dtype=torch.float32)
    attention, compiled = PackedAttention(), PackedAttention()
    layout = SequenceLayout.from_lengths([20, 19, 4, 3])
    compile_blocks([compiled], CompileConfig(enable=True, backend="aot_eager"))
    assert_same_values_and_gradients(compiled(*inputs, layout), attention(*inputs, layout), inputs)
