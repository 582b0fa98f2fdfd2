import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.qwen3.model import linear_head

LENGTHS = [5, 1, 9, 3]


def batch(lengths, *, seed=0):
    tokens = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens, positions, SequenceLayout.from_lengths(lengths)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4)])
def test_packed_equals_unpacked_in_logits_and_gradients(make_model, num_heads, num_kv_heads):
    model = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads)
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


def test_a_token_sees_its_own_sequence_and_its_own_past_alone(make_model):
    model = make_model()
    tokens, positions, layout = batch(LENGTHS)
    changed = tokens.clone()
    changed[8] = (changed[8] + 1) % 64  # third token of the third sequence
    with torch.no_grad():
        before, after = (
            model(x, positions=positions, sequences=layout, head=linear_head) for x in (tokens, changed)
        )
    differs = (before - after).abs().amax(-1) > 1e-6
    assert differs.tolist() == [8 <= i < 15 for i in range(18)]


def test_random_weights_are_the_same_for_a_seed(make_config):
    def weights(seed):
        model = make_config().build()
        model.init_weights(seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
