"""Many adapters beside one model: each row has the products of its own, with the bits that the
trainer computes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.models.batch_invariant.model import make_batch_invariant, pad_rows
from rl.models.decoder import reset_buffers
from rl.models.layers.attention import SequenceLayout
from rl.models.lora import LoRA
from rl.models.low_rank.bank import NONE, AdapterBank
from rl.models.low_rank.shapes import AdapterShapes
from rl.models.spec import model_spec

SPEC = replace(model_spec("qwen3", "tiny"), batch_invariant=True)
CPU = torch.device("cpu")


def make_model(spec=SPEC, dtype=torch.float32):
    model = spec.model.build().to(dtype)
    make_batch_invariant(model, spec=spec, device=CPU)
    model.init_weights(seed=0)
    reset_buffers(model)
    return model.requires_grad_(False)


def list_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def draw_factors(spec, lora, *, seed, dtype=torch.float32):
    shapes = AdapterShapes(spec, lora, mesh=None)
    tensors = shapes.allocate(dtype, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return shapes.read(tensors)


def hidden_alone(model, ids, factors=None):
    """The trainer's hidden states of one sequence, with an adapter beside the layers."""
    hooks = []
    for name, of_layer in (factors or {}).items():
        of_layer.layer.has_fixed_order = True
        layer = model.get_submodule(name)
        hooks.append(
            layer.register_forward_hook(lambda _, args, out, f=of_layer: f.add_to(out, args[0]))
        )
    try:
        return run(model, ids, [len(ids)])
    finally:
        for hook in hooks:
            hook.remove()


def run(model, ids, lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])
    padded = pad_rows(ids)
    rows = len(padded) - len(ids)
    layout = SequenceLayout.from_lengths([*lengths, rows] if rows else lengths)
    return model(padded, positions=pad_rows(positions), sequences=layout)[: len(ids)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_each_sequence_of_a_batch_has_the_bits_that_it_has_alone(dtype):
    """Adapters of different ranks, targets and scales, and a sequence without one, in one batch."""
    model = make_model(dtype=dtype)
    loras = [
        LoRA.Config(rank=1, alpha=2.0),
        LoRA.Config(rank=8, target_modules=("q_proj", "v_proj", "down_proj")),
        LoRA.Config(rank=16, alpha=4.0),
        LoRA.Config(rank=64),
    ]
    adapters = {}
    for n, lora in enumerate(loras):
        adapters[n + 10] = draw_factors(SPEC, lora, seed=n, dtype=dtype)
    sequences = []
    for n, version in enumerate((11, NONE, 10, 12, 11, 13)):
        ids = torch.randint(320, (3 + 7 * n,), generator=torch.Generator().manual_seed(n))
        sequences.append((version, ids))
    expected = [hidden_alone(model, ids, adapters.get(v)) for v, ids in sequences]

    bank = AdapterBank(list_layers(model), dtype=dtype)
    for version, factors in adapters.items():
        bank.load(version, factors)
    lengths = [len(ids) for _, ids in sequences]
    bank.begin(np.repeat([v for v, _ in sequences], lengths))
    together = run(model, torch.cat([ids for _, ids in sequences]), lengths)
    for (version, _), alone, part in zip(sequences, expected, together.split(lengths), strict=True):
        assert torch.equal(alone, part), version
    plain = run(model, torch.cat([ids for _, ids in sequences]), lengths)
    assert torch.equal(plain, together), "the same rows, the same adapters"
    bank.begin(np.full(sum(lengths), NONE))
    plain = run(model, torch.cat([ids for _, ids in sequences]), lengths).split(lengths)
    assert torch.equal(plain[1], together.split(lengths)[1])
    assert not torch.equal(plain[0], together.split(lengths)[0])


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
def test_one_of_the_fused_weights_is_adapted_alone(target):
    """The kernel computes PyTorch's numbers, whichever rows of a layer have no adapter."""
    lora = LoRA.Config(rank=3, target_modules=(target,))
    for factors in draw_factors(SPEC, lora, seed=0).values():
        x = torch.randn(5, factors.a.size(1), generator=torch.Generator().manual_seed(1))
        out = torch.zeros(5, factors.b.size(0))
        plain = factors.add_to(out, x)
        factors.layer.has_fixed_order = True
        torch.testing.assert_close(factors.add_to(out, x), plain, atol=1e-5, rtol=1e-5)
