import pytest
import torch
import torch.nn.functional as F

from rl.models.attention import SequenceLayout
from rl.models.buffers import persistent_buffers, reset_buffers
from rl.models.qwen3.model import linear_head
from rl.models.qwen3_moe.model import MoE, Router

LENGTHS = [5, 1, 9, 3]


def batch(lengths, *, seed=0):
    tokens = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens, positions, SequenceLayout.from_lengths(lengths)


def router(*, normalize=True):
    """Three experts, two chosen; the logits are the token itself."""
    config = MoE.Config(num_experts=3, num_experts_per_token=2, hidden_dim=4, normalize_weights=normalize)
    made = Router(config=config, dim=3)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3))
    return made


TOKEN = torch.tensor([[5.0, 1.0, 2.0]]).log()
"""Scores 5/8, 1/8 and 2/8."""


@pytest.mark.parametrize(("normalize", "expected"), [(True, [5 / 7, 2 / 7]), (False, [5 / 8, 2 / 8])])
def test_the_best_experts_are_chosen_and_weighted_by_their_scores(normalize, expected):
    weights, chosen = router(normalize=normalize)(TOKEN)
    assert chosen.tolist() == [[0, 2]]
    assert weights.tolist() == [pytest.approx(expected)]


def test_the_bias_changes_the_choice_and_no_weight():
    biased = router(normalize=False)
    # 1/8 + 0.2 is above 2/8.
    biased.load_balance_bias.copy_(torch.tensor([0.0, 0.2, 0.0]))
    weights, chosen = biased(TOKEN)
    assert chosen.tolist() == [[0, 1]]
    assert weights.tolist() == [pytest.approx([5 / 8, 1 / 8])]
    weights.sum().backward()
    assert biased.weight.grad is not None


def test_only_a_forward_with_a_graph_leaves_what_it_chose():
    made = router()
    with torch.no_grad():
        made(TOKEN)
    assert made.last_chosen_TK is None
    made(TOKEN)
    assert made.last_chosen_TK is not None
    assert made.last_chosen_TK.tolist() == [[0, 2]]


def test_forced_balance_takes_the_experts_in_turn():
    made = router()
    made.force_balance = True
    weights, chosen = made(TOKEN.expand(3, 3))
    assert chosen.tolist() == [[0, 1], [2, 0], [1, 2]]
    assert weights[0].tolist() == pytest.approx([5 / 6, 1 / 6])


def test_the_bias_stays_float32_when_the_model_is_cast_and_is_zero_after_a_reset(make_config):
    with torch.device("meta"):
        model = make_config().build().to(torch.bfloat16)
    model.to_empty(device="cpu")
    reset_buffers(model)
    buffers = persistent_buffers(model)
    assert list(buffers) == [f"layers.{i}.feed_forward.router.load_balance_bias" for i in (0, 1)]
    for bias in buffers.values():
        assert bias.dtype == torch.float32
        assert bias.tolist() == [0.0] * 6


def test_the_mixture_is_the_weighted_sum_of_its_experts_in_values_and_gradients(make_model):
    layer = make_model().layers[0].feed_forward
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


def test_packed_equals_unpacked_in_logits_and_gradients(make_model):
    model = make_model()
    tokens, positions, layout = batch(LENGTHS)
    weights = torch.randn(len(tokens), 64, generator=torch.Generator().manual_seed(1))

    packed = model(tokens, positions=positions, sequences=layout, head=linear_head)
    packed_gradients = torch.autograd.grad((packed * weights).sum(), list(model.parameters()))
    alone = torch.cat(
        [
            model(
                part, positions=torch.arange(n), sequences=SequenceLayout.from_lengths([n]), head=linear_head
            )
            for part, n in zip(tokens.split(LENGTHS), LENGTHS, strict=True)
        ]
    )
    alone_gradients = torch.autograd.grad((alone * weights).sum(), list(model.parameters()))

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for of_packed, of_alone in zip(packed_gradients, alone_gradients, strict=True):
        torch.testing.assert_close(of_packed, of_alone, atol=1e-4, rtol=1e-4)


def test_widths_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="hidden_dim=5 is not a multiple of num_kv_heads=2"):
        MoE.Config(num_experts=2, num_experts_per_token=1, hidden_dim=5).build(dim=4, num_groups=2)
    with pytest.raises(ValueError, match="num_experts_per_token=3: must be 1 to num_experts=2"):
        MoE.Config(num_experts=2, num_experts_per_token=3, hidden_dim=4)
