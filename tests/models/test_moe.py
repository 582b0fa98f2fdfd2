from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl.models.moe import ExpertRouter, MoE, grouped_linear, one_kernel
from tests.support.policies import random_model, small_spec


def router(*, normalize=True):
    """Make a router that chooses two of three experts and whose logits are the token itself."""
    config = MoE.Config(num_experts=3, num_experts_per_token=2, hidden_dim=4, normalize_weights=normalize)
    made = ExpertRouter(config=config, dim=3)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3))
    return made


TOKEN = torch.tensor([[5.0, 1.0, 2.0]]).log()
"""Token with scores 5/8, 1/8 and 2/8."""


@pytest.mark.parametrize(("normalize", "expected"), [(True, [5 / 7, 2 / 7]), (False, [5 / 8, 2 / 8])])
def test_best_experts_are_weighted_by_their_scores(normalize, expected):
    weights, chosen = router(normalize=normalize)(TOKEN)
    assert chosen.tolist() == [[0, 2]]
    assert weights.tolist() == [pytest.approx(expected)]


def test_bias_changes_the_choice_but_no_weight():
    biased = router(normalize=False)
    # 1/8 + 0.2 is above 2/8.
    biased.load_balance_bias.copy_(torch.tensor([0.0, 0.2, 0.0]))
    weights, chosen = biased(TOKEN)
    assert chosen.tolist() == [[0, 1]]
    assert weights.tolist() == [pytest.approx([5 / 8, 1 / 8])]
    weights.sum().backward()
    assert biased.weight.grad is not None


def test_forced_balance_takes_the_experts_in_turn():
    made = router()
    made.force_balance = True
    weights, chosen = made(TOKEN.expand(3, 3))
    assert chosen.tolist() == [[0, 1], [2, 0], [1, 2]]
    assert weights[0].tolist() == pytest.approx([5 / 6, 1 / 6])


def test_mixture_is_the_weighted_sum_of_its_experts_in_values_and_gradients():
    layer: Any = random_model(small_spec(experts=True), seed=0).layers[0]
    layer = layer.feed_forward
    x = torch.randn(13, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights, chosen = layer.router(x)
    expected = torch.zeros(13, 32)
    experts = layer.experts
    for token in range(13):
        for k in range(2):
            n = int(chosen[token, k])
            # Rows of an expert: gate and up of the first key-value head, then of the second.
            gate_up = F.linear(x[token], experts.gate_up_proj[n]).view(2, 2, 12)
            hidden = (F.silu(gate_up[:, 0]) * gate_up[:, 1]).flatten()
            row = weights[token, k] * F.linear(hidden, experts.down_proj[n])
            expected = expected.index_add(0, torch.tensor([token]), row[None])
    out = layer(x)
    pull = torch.randn(13, 32, generator=torch.Generator().manual_seed(1))
    at = [x, *layer.parameters()]
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(
        torch.autograd.grad(out, at, pull), torch.autograd.grad(expected, at, pull), strict=True
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def inputs(dtype=torch.float32):
    """Make nine rows for four groups, of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor([3, 3, 4, 9])


def gradients(out, x, weight):
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, (x, weight), pull)


def test_grouped_kernel_computes_the_same_product():
    # GPUs use it in bfloat16; PyTorch's CPU form allows the comparison here.
    x, weight, ends = inputs(torch.bfloat16)
    expected, out = grouped_linear(x, weight, ends), one_kernel(x, weight, ends)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(gradients(out, x, weight), gradients(expected, x, weight), strict=True):
        torch.testing.assert_close(actual, wanted)
