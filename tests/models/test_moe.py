from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl.models.layers.moe import ExpertRouter, MoE, multiply_groups, multiply_in_one_kernel
from rl.models.parallelize import check_tensor_parallel
from tests.support.policies import random_model, small_spec


def router(*, normalize=True):
    """Make a router that chooses two of three experts and whose logits are the token itself."""
    config = MoE.Config(
        num_experts=3, num_experts_per_token=2, hidden_dim=4, normalize_weights=normalize
    )
    made = ExpertRouter(config=config, dim=3)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3))
    return made


TOKEN = torch.tensor([[5.0, 1.0, 2.0]]).log()
"""Token with scores 5/8, 1/8 and 2/8."""


@pytest.mark.parametrize(
    ("normalize", "expected"), [(True, [5 / 7, 2 / 7]), (False, [5 / 8, 2 / 8])]
)
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


def test_width_of_an_expert_need_not_be_a_multiple_of_the_key_value_heads():
    spec = small_spec(experts=True)
    block: Any = spec.model.block
    block.feed_forward.hidden_dim = 21
    model: Any = random_model(spec, seed=0)
    experts, adapter = model.layers[0].feed_forward.experts, spec.adapter(spec.model)
    name = "layers.0.feed_forward.experts.gate_up_proj"
    tensors = list(adapter.to_hf(name, experts.gate_up_proj.detach()).values())
    assert torch.equal(adapter.from_hf(name, tensors), experts.gate_up_proj)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    hidden = F.silu(F.linear(x, tensors[0])) * F.linear(x, tensors[1])
    all_to_the_first = torch.full((block.feed_forward.num_experts,), 3)
    torch.testing.assert_close(
        experts.compute(x, all_to_the_first), F.linear(hidden, experts.down_proj[0])
    )
    assert block.attention.num_kv_heads == 2
    check_tensor_parallel(spec.model, 2, whole_experts=True)
    with pytest.raises(ValueError, match="tensor_parallel_degree=2 does not divide hidden_dim=21"):
        check_tensor_parallel(spec.model, 2)


def inputs(dtype=torch.float32, *, sizes=(24, 16)):
    """Make nine rows for four groups, of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, sizes[1], generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, *sizes, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor([3, 3, 4, 9])


def gradients(out, x, weight):
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, (x, weight), pull)


@pytest.mark.parametrize("sizes", [(24, 16), (20, 16), (24, 13), (7, 9)])
def test_grouped_kernel_computes_the_same_product(sizes):
    # GPUs use it in bfloat16, for rows of a multiple of 16 bytes; PyTorch's CPU form allows the
    # comparison here.
    x, weight, ends = inputs(torch.bfloat16, sizes=sizes)
    expected, out = multiply_groups(x, weight, ends), multiply_in_one_kernel(x, weight, ends)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(
        gradients(out, x, weight), gradients(expected, x, weight), strict=True
    ):
        torch.testing.assert_close(actual, wanted)
