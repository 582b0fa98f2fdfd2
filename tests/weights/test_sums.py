"""The checksum's definition, and that it holds for every layout, dtype and device path."""

import itertools

import numpy as np
import pytest
import torch

from rl.weights.sums import BLOCK, checksum, sum_by_torch

DTYPES = [
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.int32,
    torch.float32, torch.int64, torch.float64,
]  # fmt: skip
SHAPES = [(), (5,), (2 * BLOCK + 3,), (7, 9), (4, BLOCK + 1), (3, 5, 7), (2, 3, 4, 5), (0, 4)]


def random(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def whole(tensor):
    return checksum(tensor, global_shape=tensor.shape, offsets=(0,) * tensor.dim())


def test_sum_of_two_elements_by_hand():
    """Column weights: the finalizer of MurmurHash3 of 1 and 2; row weight: splitmix64 of 0, made odd."""

    def murmur(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    row_weight = 0xE220A8397B1DCDAF  # the first number of splitmix64 from seed 0, which is odd
    assert murmur(1) == 0x514E28B7
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    bits = [0x3F80, 0xC000]
    expected = (bits[0] * murmur(1) + bits[1] * murmur(2)) * row_weight % 2**64
    assert whole(tensor) == expected
    assert sum_by_torch(tensor, global_shape=(2,), offsets=(0,)) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_loop_and_pytorch_agree_and_boxes_add_up_however_they_are_cut(dtype):
    for shape in SHAPES:
        tensor = random(shape, dtype)
        total = whole(tensor)
        assert total == sum_by_torch(tensor, global_shape=shape, offsets=(0,) * len(shape)), shape
        for dim in range(len(shape)):
            parts = 0
            for start, stop in itertools.pairwise((0, shape[dim] // 3, shape[dim] // 2, shape[dim])):
                box = tensor.narrow(dim, start, stop - start)
                offsets = [start if d == dim else 0 for d in range(len(shape))]
                part = checksum(box, global_shape=shape, offsets=offsets)
                assert part == sum_by_torch(box, global_shape=shape, offsets=offsets)
                parts += part
            assert parts % 2**64 == total, (shape, dim)


def test_boxes_cut_in_two_dims_add_up():
    tensor = random((6, 3, 2 * BLOCK), torch.bfloat16)
    rows, columns = ((0, 1), (1, 6)), ((0, BLOCK - 5), (BLOCK - 5, 2 * BLOCK))
    parts = [
        checksum(tensor[a:b, :, c:d], global_shape=tensor.shape, offsets=(a, 0, c))
        for (a, b), (c, d) in itertools.product(rows, columns)
    ]
    assert sum(parts) % 2**64 == whole(tensor)


def test_memory_layout_does_not_matter():
    tensor = random((6, 10), torch.float32)
    assert whole(tensor.t().contiguous().t()) == whole(tensor)
    assert whole(torch.ones(3, 4).expand(3, 4)) == whole(torch.ones(1, 1).expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_every_single_bit_counts(dtype):
    tensor = random((3, 5), dtype)
    total = whole(tensor)
    flat = tensor.view(torch.uint8).view(-1)
    for i, bit in itertools.product(range(flat.numel()), range(8)):
        flat[i] ^= 1 << bit
        assert whole(tensor) != total, (i, bit)
        flat[i] ^= 1 << bit
    assert whole(tensor) == total


def test_elements_rows_and_columns_that_changed_places_change_the_sum():
    tensor = random((40, 30), torch.bfloat16)
    total = whole(tensor)
    for i, j in itertools.combinations(range(40), 2):
        order = torch.arange(40)
        order[[i, j]] = order[[j, i]]
        assert whole(tensor[order]) != total
    for i, j in itertools.combinations(range(30), 2):
        order = torch.arange(30)
        order[[i, j]] = order[[j, i]]
        assert whole(tensor[:, order]) != total
        swapped = tensor.clone()
        swapped[7, [i, j]] = swapped[7, [j, i]]
        assert whole(swapped) != total or tensor[7, i] == tensor[7, j]
    assert whole(tensor.reshape(30, 40)) != total


def test_a_place_in_a_large_tensor_is_told_from_all_others():
    """Rows far beyond 32 bits of elements, with one element that is not zero."""
    box = torch.ones(1, 1, dtype=torch.bfloat16)
    offsets = [(row, column) for row in (0, 1, 2**20, 2**33) for column in (0, 1, BLOCK, 70_000)]
    sums = [checksum(box, global_shape=(2**34, 80_000), offsets=at) for at in offsets]
    assert len(np.unique(np.array(sums, dtype=np.uint64))) == len(offsets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's path")
def test_sum_on_a_gpu_is_that_on_a_cpu():
    tensor = random((300, BLOCK + 7), torch.bfloat16)
    assert whole(tensor.cuda()) == whole(tensor)


def test_a_tensor_that_was_summed_can_give_its_memory_back():
    tensor = torch.arange(64, dtype=torch.float32)
    checksum(tensor, global_shape=(64,), offsets=(0,))
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
