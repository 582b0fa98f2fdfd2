"""Checksums of both sides compared: what is caught, and that what is right passes in any layout."""

import pytest
import torch

from rl.types import BoxSum
from rl.weights.canary import check_sums
from rl.weights.errors import WeightCanaryError
from rl.weights.sums import checksum

W = torch.arange(48.0).reshape(6, 8).bfloat16()
B = torch.arange(6.0)


def boxes(name, tensor, *cuts):
    """Sums of the slices of rows and columns; of the whole tensor without any."""
    if not cuts:
        cuts = (tuple(slice(0, size) for size in tensor.shape),)
    return [
        BoxSum(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            global_shape=tuple(tensor.shape),
            offsets=tuple(s.start for s in cut),
            shape=tuple(tensor[cut].shape),
            value=checksum(tensor[cut], global_shape=tensor.shape, offsets=[s.start for s in cut]),
        )
        for cut in cuts
    ]


def rows(start, stop):
    return (slice(start, stop), slice(0, 8))


def columns(start, stop):
    return (slice(0, 6), slice(start, stop))


PUSHED = [*boxes("w", W, rows(0, 4), rows(4, 6)), *boxes("b", B)]


def check(*pulled, pushed=PUSHED):
    check_sums(version=7, pushed=pushed, pulled={f"generator_{i}": p for i, p in enumerate(pulled)})


def test_any_layout_of_the_same_bits_passes():
    halves = boxes("w", W, columns(0, 3), columns(3, 8))
    check([*halves, *boxes("b", B), *boxes("b", B)], [*boxes("w", W), *boxes("b", B)])
    # A rank may hold nothing of a tensor with fewer rows than ranks.
    check([*boxes("w", W, rows(0, 6), rows(6, 6)), *boxes("b", B)])
    # One rank with all, two with halves; trainer ranks that all report the same copy.
    check([*halves, *boxes("w", W), *boxes("b", B)], pushed=PUSHED + PUSHED)


def changed(tensor, index):
    other = tensor.clone()
    other[index] += 1
    return other


def test_other_bits_name_generator_tensor_and_version():
    wrong = [*boxes("w", changed(W, (5, 7))), *boxes("b", B)]
    message = r"version 7: generator 'generator_1' holds other bits in 'w' than the trainer sent"
    with pytest.raises(WeightCanaryError, match=message):
        check([*boxes("w", W), *boxes("b", B)], wrong)


def test_bits_at_another_place_are_other_bits():
    swapped = W.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    with pytest.raises(WeightCanaryError, match="other bits in 'w'"):
        check([*boxes("w", swapped), *boxes("b", B)])


def test_every_copy_of_what_several_ranks_hold_is_compared():
    with pytest.raises(
        WeightCanaryError, match="ranks of generator 'generator_0' hold different bits in 'b'"
    ):
        check([*boxes("w", W), *boxes("b", B), *boxes("b", changed(B, 2))])
    halves = boxes("w", changed(W, (0, 0)), columns(0, 3), columns(3, 8))
    with pytest.raises(WeightCanaryError, match="hold different bits in 'w'"):
        check([*boxes("w", W), *halves, *boxes("b", B)])
    with pytest.raises(WeightCanaryError, match="ranks of the trainer hold different bits in 'b'"):
        check([], pushed=[*PUSHED, *boxes("b", changed(B, 0))])


def test_another_dtype_does_not_pass_though_the_numbers_are_equal():
    with pytest.raises(
        WeightCanaryError,
        match=r"version 7: 'w' was sent with dtype bfloat16 and .* 'generator_0' holds it with dtype float32",
    ):
        check([*boxes("w", W.float()), *boxes("b", B)])


def test_another_shape_does_not_pass():
    with pytest.raises(WeightCanaryError, match=r"'b' was sent with shape \(6,\) .* shape \(7,\)"):
        check([*boxes("w", W), *boxes("b", torch.zeros(7))])


def test_missing_and_unknown_tensors_are_named():
    with pytest.raises(WeightCanaryError, match="version 7: generator 'generator_0' has no tensor 'b'"):
        check(boxes("w", W))
    with pytest.raises(WeightCanaryError, match="version 7: the trainer has no tensor 'extra'"):
        check([*boxes("w", W), *boxes("b", B), *boxes("extra", B)])


@pytest.mark.parametrize("held", [[rows(0, 4)], [rows(0, 4), rows(3, 6)]])
def test_boxes_that_do_not_make_up_the_tensor_are_an_error(held):
    with pytest.raises(WeightCanaryError, match=r"generator 'generator_0' cover \d+ of 48 elements of 'w'"):
        check([*boxes("w", W, *held), *boxes("b", B)])
    with pytest.raises(WeightCanaryError, match=r"the trainer cover 32 of 48 elements of 'w'"):
        check([*boxes("w", W), *boxes("b", B)], pushed=[*boxes("w", W, rows(0, 4)), *boxes("b", B)])
