from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl.models.decoder import find_persistent_buffers, linear_head, reset_buffers
from rl.models.layers.attention import SequenceLayout
from rl.models.layers.norm import RMSNorm
from tests.support.policies import full_logits, random_model, small_spec

LENGTHS = [5, 1, 9, 3]


def batch(lengths):
    tokens = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens, positions, SequenceLayout.from_lengths(lengths)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_kv_heads": 2},
        {"num_kv_heads": 4},
        {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "qk_norm": False},
        {
            "family": "gemma3_text",
            "num_kv_heads": 1,
            "switches": {"window": 4, "global_layers": (1,)},
        },
        {"experts": True},
    ],
    ids=str,
)
def test_packed_equals_unpacked_in_logits_and_gradients(sizes):
    model = random_model(small_spec(**sizes), seed=0)
    tokens, positions, layout = batch(LENGTHS)
    weights = torch.randn(len(tokens), 64, generator=torch.Generator().manual_seed(1))

    packed = model(tokens, positions=positions, sequences=layout, head=linear_head)
    packed_gradients = torch.autograd.grad((packed * weights).sum(), list(model.parameters()))
    alone = torch.cat([full_logits(model, part) for part in tokens.split(LENGTHS)])
    alone_gradients = torch.autograd.grad((alone * weights).sum(), list(model.parameters()))

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for of_packed, of_alone in zip(packed_gradients, alone_gradients, strict=True):
        torch.testing.assert_close(of_packed, of_alone, atol=1e-4, rtol=1e-4)


def test_load_balance_bias_stays_float32_and_is_zero_after_a_reset():
    with torch.device("meta"):
        model = small_spec(experts=True).model.build().to(torch.bfloat16)
    model.to_empty(device="cpu")
    reset_buffers(model)
    buffers = find_persistent_buffers(model)
    assert list(buffers) == [f"layers.{i}.feed_forward.router.load_balance_bias" for i in (0, 1)]
    for bias in buffers.values():
        assert bias.dtype == torch.float32
        assert bias.tolist() == [0.0] * 6


def test_persistent_buffers_are_read_without_the_hooks_of_state_dict():
    model = random_model(small_spec(experts=True), seed=0)
    model.register_state_dict_pre_hook(
        lambda *_: pytest.fail("FSDP's hook would shard the model again")
    )
    assert len(find_persistent_buffers(model)) == 2


@pytest.mark.parametrize("tie", [True, False])
def test_float32_head_does_not_round_logits_and_returns_gradients_in_the_weights_dtype(tie):
    model = random_model(small_spec(tie=tie), seed=0).bfloat16()
    tokens, positions, layout = batch([7])
    inputs: dict[str, Any] = {"positions": positions, "sequences": layout}
    hidden = model(tokens, **inputs)
    exact = hidden.double() @ model.head_weight.double().T
    rounded = model(tokens, **inputs, head=linear_head)
    assert (rounded - exact).abs().max() > 1e-3
    model.float32_head = True
    logits = model(tokens, **inputs, head=linear_head)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-6)
    logits.square().sum().backward()
    gradient = model.head_weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 5e-7), (torch.bfloat16, 1.8e-3)], ids=str
)
@pytest.mark.parametrize("frozen", [False, True])
def test_norm_has_pytorchs_values_and_its_exact_gradients(dtype, bound, frozen):
    norm = RMSNorm(48, eps=1e-2, dtype=dtype)
    norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    norm.weight.requires_grad_(not frozen)
    x, pull = (
        torch.randn(7, 5, 48, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2)
    )
    inputs = [x.requires_grad_()] if frozen else [x.requires_grad_(), norm.weight]
    exact = [value.detach().double().requires_grad_() for value in (x, norm.weight)]

    out = norm(x)
    assert torch.equal(out, F.rms_norm(x, (48,), norm.weight, 1e-2))
    gradients = torch.autograd.grad(
        F.rms_norm(exact[0], (48,), exact[1], 1e-2), exact, pull.double()
    )
    for ours, theirs in zip(torch.autograd.grad(out, inputs, pull), gradients, strict=False):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() <= bound * theirs.norm()
