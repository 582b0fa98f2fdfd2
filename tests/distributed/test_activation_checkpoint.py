from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig, checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x, scale):
        return x + self.down(nn.functional.silu(self.up(x)).sin()) * scale


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def measured(**config):
    """Return operation counts of a forward and backward through 4 blocks, and all gradients."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(4))
    checkpoint_activations(blocks, ActivationCheckpointConfig(**config))
    x = torch.randn(3, 6, requires_grad=True)
    with Ops() as ops:
        out = x
        for block in blocks:
            out = block(out, torch.tensor(2.0))
        out.square().sum().backward()
    gradients = {name: p.grad for name, p in blocks.named_parameters()}
    return ops.counts, gradients | {"x": x.grad}


@pytest.mark.parametrize(
    ("config", "num_sin", "more_products"),
    [
        ({"mode": "none"}, 4, False),
        ({"mode": "full"}, 8, True),
        ({"mode": "selective"}, 8, False),
        ({"mode": "selective", "selective_option": "1"}, 8, True),
        ({"mode": "selective", "selective_option": "2"}, 6, True),
        ({"mode": "selective", "selective_option": "3"}, 6, True),  # blocks 0 and 3
        ({"mode": "selective", "selective_option": "9"}, 5, True),
    ],
)
def test_each_mode_recomputes_its_operations_and_keeps_gradients(config, num_sin, more_products):
    counts, gradients = measured(**config)
    plain, expected = measured()
    assert counts["aten::sin"] == num_sin
    assert (counts["aten::mm"] > plain["aten::mm"]) == more_products
    assert list(gradients) == list(expected)  # parameters keep their names
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("option", ["ops", "0", "-1", "1.5"])
def test_invalid_option_is_rejected(option):
    with pytest.raises(ValueError, match=rf"selective_option='{option}'.*must be 'op' or a number"):
        ActivationCheckpointConfig(mode="selective", selective_option=option)
