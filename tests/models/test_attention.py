"""Attention over a packed batch against the textbook's, one sequence and one head at a time."""

import pytest
import torch

from rl.distributed.context_parallel import ContextParallel
from rl.models.attention import (
    PackedAttention,
    Segments,
    SequenceLayout,
    SequenceShare,
    attend_in_segments,
)
from rl.models.batch_invariant.model import InvariantAttention


def textbook(inputs, lengths):
    q_THD, k_TKD, v_TKD = inputs
    group_size = q_THD.size(1) // k_TKD.size(1)
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        heads = []
        for h in range(q_THD.size(1)):
            q, k, v = q_THD[rows, h], k_TKD[rows, h // group_size], v_TKD[rows, h // group_size]
            scores = (q @ k.T / q.size(-1) ** 0.5).masked_fill(
                ~torch.ones(length, length).tril().bool(), -1e30
            )
            heads.append(scores.softmax(-1) @ v)
        parts.append(torch.stack(heads, dim=1))
    return torch.cat(parts)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[3, 1, 40], [96], [5, 97], [20, 19, 18, 17, 2, 2]])
def test_packed_attention_and_its_gradient_are_the_textbooks(lengths, num_kv_heads):
    random = torch.Generator().manual_seed(0)

    def drawn(num_heads):
        return torch.randn(sum(lengths), num_heads, 8, generator=random, dtype=torch.float64)

    inputs = [drawn(heads).requires_grad_() for heads in (4, num_kv_heads, num_kv_heads)]
    weights_THD = drawn(4)
    out = PackedAttention()(*inputs, SequenceLayout.from_lengths(lengths))
    expected = textbook(inputs, lengths)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(
        torch.autograd.grad((out * weights_THD).sum(), inputs),
        torch.autograd.grad((expected * weights_THD).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[3, 1, 44], [96], [5, 91], [13] * 7 + [5]])
def test_attention_of_the_ranks_of_context_parallelism_is_the_textbooks(lengths, num_ranks):
    random = torch.Generator().manual_seed(0)

    def drawn(num_heads):
        return torch.randn(sum(lengths), num_heads, 8, generator=random, dtype=torch.float64)

    q, k, v = (drawn(heads).requires_grad_() for heads in (4, 2, 2))
    contexts = [ContextParallel(rank=rank, num_ranks=num_ranks, group="none") for rank in range(num_ranks)]
    indices = [context.token_indices(len(q)) for context in contexts]
    one_after_another = torch.cat(indices)
    parts = []
    for mine, context in zip(indices, contexts, strict=True):
        share = SequenceShare.from_lengths(lengths, context=context)
        k_NKD, v_NKD = (x[one_after_another][share.key_rows] for x in (k, v))
        parts.append(attend_in_segments(q[mine], k_NKD, v_NKD, share))
    out = torch.cat(parts)[contexts[0].places(len(q))]
    expected = textbook((q, k, v), lengths)
    torch.testing.assert_close(out, expected)
    weights_THD = drawn(4)
    for actual, wanted in zip(
        torch.autograd.grad((out * weights_THD).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights_THD).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


# Kernels of the batch-invariant one are compiled at their first use.
@pytest.mark.parametrize("core", ["grid", pytest.param("batch-invariant", marks=pytest.mark.medium)])
def test_attention_after_a_shared_prefix_is_the_textbooks_over_whole_sequences(core):
    random = torch.Generator().manual_seed(0)
    # Two sequences of 7 + 5 and 7 + 1 tokens with the first 7 in common, one of 4 alone.
    rows, lengths = [[*range(7), *range(7, 12)], [*range(7), 12], [*range(13, 17)]], [12, 8, 4]
    segments = Segments.after_prefixes([7, 5, 1, 4], [(0, 0), (0, 7), (0, 7), (0, 0)])
    attention = PackedAttention() if core == "grid" else InvariantAttention()
    inputs = [torch.randn(17, heads, 16, generator=random).requires_grad_() for heads in (4, 2, 2)]
    weights_THD = torch.randn(17, 4, 16, generator=random)
    out = attention(*inputs, segments)
    flat = [row for sequence in rows for row in sequence]
    whole = textbook([x[flat] for x in inputs], lengths)
    torch.testing.assert_close(out[flat], whole)
    expected = whole[[flat.index(row) for row in range(17)]]
    for actual, wanted in zip(
        torch.autograd.grad((out * weights_THD).sum(), inputs),
        torch.autograd.grad((expected * weights_THD).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


def test_neighbours_of_similar_length_share_a_grid():
    layout = SequenceLayout.from_lengths([10, 9, 8, 2, 2, 40])
    assert layout.runs == ((2, 10), (1, 8), (2, 2), (1, 40))
    # 20 rows of the first grid, of which the 20th is a gap; then 8, 4 and 40 without any.
    assert layout.run_slots.tolist() == [*range(19), *range(20, 72)]


def test_a_run_is_as_wide_as_its_longest_wherever_that_stands():
    assert SequenceLayout.from_lengths([9, 10, 9]).runs == ((3, 10),)
    # 10 and 11 are similar, but 11 and 9 are not.
    assert SequenceLayout.from_lengths([9, 10, 11]).runs == ((2, 10), (1, 11))


def test_attention_compiled_is_that_of_eager():
    lengths = [20, 19, 4, 3]
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, 8, generator=random).requires_grad_() for heads in (4, 2, 2)]
    attention, layout = PackedAttention(), SequenceLayout.from_lengths(lengths)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*inputs, layout), attention(*inputs, layout)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)
