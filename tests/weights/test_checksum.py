"""Checksums for every sharding, dtype and device, and parity of two sides by their checksums."""

import itertools

import numpy as np
import pytest
import torch

from rl.types import BoxSum
from rl.weights.checksum import check_sums, checksum, enqueue_checksum
from rl.weights.types import WeightParityError

DTYPES = [
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32,
    torch.int64, torch.float64,
]  # fmt: skip
SHAPES = [(), (5,), (9000,), (7, 9), (4, 5000), (3, 5, 7), (2, 3, 4, 5), (0, 4)]


def random(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def whole(tensor):
    return checksum(tensor, global_shape=tensor.shape, offsets=(0,) * tensor.dim())


def torch_sum(tensor, shape, offsets):
    return int(enqueue_checksum(tensor, global_shape=shape, offsets=offsets)) % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_add_up_however_they_are_cut_and_both_implementations_agree(dtype):
    for shape in SHAPES:
        tensor = random(shape, dtype)
        total = whole(tensor)
        assert total == torch_sum(tensor, shape, (0,) * len(shape)), shape
        for dim in range(len(shape)):
            parts = 0
            for start, stop in itertools.pairwise(
                (0, shape[dim] // 3, shape[dim] // 2, shape[dim])
            ):
                box = tensor.narrow(dim, start, stop - start)
                offsets = [start if d == dim else 0 for d in range(len(shape))]
                part = checksum(box, global_shape=shape, offsets=offsets)
                assert part == torch_sum(box, shape, offsets)
                parts += part
            assert parts % 2**64 == total, (shape, dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_every_bit_changes_the_sum(dtype):
    tensor = random((3, 5), dtype)
    total = whole(tensor)
    flat = tensor.view(torch.uint8).view(-1)
    for i, bit in itertools.product(range(flat.numel()), range(8)):
        flat[i] ^= 1 << bit
        assert whole(tensor) != total, (i, bit)
        flat[i] ^= 1 << bit


def test_swapped_rows_of_different_slabs_change_the_sum():
    tensor = random((2, 2, 3), torch.float32)
    swapped = tensor.clone()
    swapped[0, 1], swapped[1, 0] = tensor[1, 0], tensor[0, 1]
    assert whole(tensor) != whole(swapped)


def test_swapped_rows_and_columns_change_the_sum():
    tensor = random((40, 30), torch.bfloat16)
    orders = [[1, 0, *range(2, 40)], [*range(38), 39, 38]]
    sums = {
        whole(tensor),
        whole(tensor.reshape(30, 40)),
        *(whole(tensor[order]) for order in orders),
    }
    sums |= {whole(tensor[:, [5, 1, 2, 3, 4, 0, *range(6, 30)]])}
    assert len(sums) == 5
    box = torch.ones(1, 1, dtype=torch.bfloat16)
    offsets = [(row, column) for row in (0, 1, 2**20, 2**33) for column in (0, 1, 4096, 70_000)]
    at = [checksum(box, global_shape=(2**34, 80_000), offsets=offset) for offset in offsets]
    assert len(np.unique(np.array(at, dtype=np.uint64))) == len(offsets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_on_gpu_and_cpu_are_equal():
    tensor = random((300, 5000), torch.bfloat16)
    assert whole(tensor.cuda()) == whole(tensor)


def test_summed_tensor_can_free_its_memory():
    tensor = torch.arange(64, dtype=torch.float32)
    whole(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


W = torch.arange(48.0).reshape(6, 8).bfloat16()
B = torch.arange(6.0)


def boxes(name, tensor, *cuts):
    """Return the sums of slices of rows and columns, or of the whole tensor."""
    return [
        BoxSum(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            global_shape=tuple(tensor.shape),
            offsets=tuple(s.start for s in cut),
            shape=tuple(tensor[cut].shape),
            value=checksum(tensor[cut], global_shape=tensor.shape, offsets=[s.start for s in cut]),
        )
        for cut in cuts or [tuple(slice(0, size) for size in tensor.shape)]
    ]


def rows(start, stop):
    return (slice(start, stop), slice(0, 8))


def changed(tensor, index):
    other = tensor.clone()
    other[index] += 1
    return other


HALVES = ((slice(0, 6), slice(0, 3)), (slice(0, 6), slice(3, 8)))
W_SUMS, B_SUMS = boxes("w", W), boxes("b", B)
PUSHED = [*boxes("w", W, rows(0, 4), rows(4, 6)), *B_SUMS]


def check(*pulled, pushed=PUSHED):
    check_sums(version=7, pushed=pushed, pulled={f"generator_{i}": p for i, p in enumerate(pulled)})


def test_any_sharding_of_the_same_bits_passes():
    halves = boxes("w", W, *HALVES)
    check([*halves, *B_SUMS, *B_SUMS], [*W_SUMS, *W_SUMS, *B_SUMS])
    # A rank may hold nothing of a tensor with fewer rows than ranks.
    check([*boxes("w", W, rows(0, 6), rows(6, 6)), *B_SUMS])
    check([*halves, *B_SUMS], pushed=PUSHED + PUSHED)


@pytest.mark.parametrize(
    ("pulled", "message"),
    [
        (
            boxes("w", changed(W, (5, 7))) + B_SUMS,
            "'generator_0' holds other bits in 'w' than the trainer",
        ),
        (
            W_SUMS + B_SUMS + boxes("b", changed(B, 2)),
            "'generator_0', tensor 'b': ranks hold different bits",
        ),
        (
            boxes("w", W.float()) + B_SUMS,
            r"holds 'w' as \('float32', .* was sent as \('bfloat16', ",
        ),
        (
            W_SUMS + boxes("b", torch.zeros(7)),
            r"\(7,\)\), and it was sent as \('float32', \(6,\)\)",
        ),
        (W_SUMS, "generator 'generator_0' has no tensor 'b'"),
        (W_SUMS + B_SUMS + boxes("extra", B), "the trainer has no tensor 'extra'"),
        (
            boxes("w", W, rows(0, 4)) + B_SUMS,
            "'generator_0' holds other bits in 'w' than the trainer",
        ),
    ],
)
def test_differences_of_a_generator_are_named(pulled, message):
    with pytest.raises(WeightParityError, match=f"version 7: .*{message}"):
        check(pulled)


def test_differences_between_trainer_ranks_are_named():
    with pytest.raises(
        WeightParityError, match="the trainer, tensor 'b': ranks hold different bits"
    ):
        check([], pushed=[*PUSHED, *boxes("b", changed(B, 0))])
