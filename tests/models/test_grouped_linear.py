import pytest
import torch
import torch.nn.functional as F

from rl.models.grouped_linear import grouped_linear, one_kernel


def inputs(dtype=torch.float32):
    """Nine rows for four groups, of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor([3, 3, 4, 9])


def gradients(out, x, weight):
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, (x, weight), pull)


def test_each_run_of_rows_meets_its_own_weight():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    weight = torch.tensor([[[2.0, 3.0]], [[5.0, 7.0]]])
    assert grouped_linear(x, weight, torch.tensor([1, 3])).tolist() == [[2.0], [7.0], [12.0]]
    assert grouped_linear(x, weight, torch.tensor([0, 3])).tolist() == [[5.0], [7.0], [12.0]]


def test_values_and_gradients_are_those_of_one_linear_a_group():
    x, weight, ends = inputs()
    parts = zip(x.tensor_split(ends[:-1]), weight, strict=True)
    expected = torch.cat([F.linear(rows, w) for rows, w in parts])
    out = grouped_linear(x, weight, ends)
    torch.testing.assert_close(out, expected)
    ours = gradients(out, x, weight)
    for actual, wanted in zip(ours, gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(actual, wanted)
    assert not ours[1][1].any()


def test_without_a_row_gradients_are_zeros_and_not_absent():
    x, weight, _ = inputs()
    out = grouped_linear(x[:0], weight, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 24)
    _, of_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert of_weight.shape == weight.shape
    assert not of_weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_is_asked_for_the_same_product(dtype):
    """On a GPU it is taken in bfloat16; PyTorch has it on a CPU as well, where it can be compared."""
    x, weight, ends = inputs(dtype)
    expected, out = grouped_linear(x, weight, ends), one_kernel(x, weight, ends)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(gradients(out, x, weight), gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(actual, wanted)
