"""Operations and bytes counted from shapes, compared with PyTorch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples import custom_model
from rl.distributed.mesh import Degrees
from rl.models import qwen2, qwen3, qwen3_moe
from rl.models.converter import ModelConverters
from rl.models.decoder import linear_head
from rl.models.layers.attention import SequenceLayout
from rl.models.lora import LoRA
from rl.models.model_cost import count_work
from rl.models.qwen3 import model_registry

LENGTHS = [24, 24]
NUM_TOKENS = sum(LENGTHS)


def pytorchs_counts(spec, *, backward):
    """Return the operations that PyTorch counts in products and in attention."""
    model = spec.model.build()
    model.init_weights(seed=0)
    # FlopCounterMode does not count the CPU's own kernel for attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = model(
            torch.arange(NUM_TOKENS) % spec.model.vocab_size,
            positions=torch.cat([torch.arange(n) for n in LENGTHS]),
            sequences=SequenceLayout.from_lengths(LENGTHS),
            head=linear_head,
        )
        if backward:
            out.square().sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = sum(n for name, n in counts.items() if "attention" in name or "bmm" in name)
    return sum(counts.values()) - attention, attention


@pytest.mark.parametrize("family", [qwen3, qwen3_moe, qwen2, custom_model])
def test_operations_equal_those_that_pytorch_counts(family):
    spec = family.model_registry("tiny")
    work = count_work(spec.model)
    attended = sum(
        n * n for n in LENGTHS
    )  # On a CPU the hidden half of the scores is computed too.
    for flops, backward in ((work.count_sampling_flops, False), (work.count_training_flops, True)):
        products, attention = pytorchs_counts(spec, backward=backward)
        assert flops(tokens=NUM_TOKENS, attended=0) == products
        # On a CPU the backward computes the scores once more: 14 operations a number instead of 12.
        assert flops(tokens=0, attended=attended) * (14 if backward else 12) / 12 == attention


def test_sizes_of_the_registry_are_counted_without_memory():
    dense = count_work(model_registry("32B").model)
    table = 151_936 * 5120
    assert dense.products == dense.trained
    assert dense.parameters - dense.products - table == 64 * (2 * 5120 + 2 * 128) + 5120  # norms
    assert (dense.attention, dense.cached) == (64 * 64 * 128, 2 * 64 * 8 * 128)
    mixture = count_work(qwen3_moe.model_registry("30B-A3B").model)
    assert mixture.products == pytest.approx(3.0e9, rel=0.05)  # its name says so


def test_only_adapters_have_weight_gradients():
    spec = model_registry("tiny")
    lora, degrees = LoRA.Config(rank=4), Degrees(dp_replicate=1, dp_shard=1, tp=1)
    converters = ModelConverters((lora,), spec=spec, degrees=degrees, device=torch.device("cpu"))
    with torch.device("meta"):
        module = spec.model.build()
        converters.convert(module)
    plain, adapted = count_work(spec.model), count_work(spec.model, converted=module)
    assert adapted.trained == adapted.parameters - plain.parameters
    assert adapted.products == plain.products + adapted.trained
    full = plain.count_training_flops(tokens=1, attended=0)
    assert adapted.count_training_flops(tokens=1, attended=0) == pytest.approx(
        2 / 3 * full, rel=0.2
    )


def test_decoding_reads_only_the_chosen_experts():
    work = count_work(qwen3_moe.model_registry("tiny").model)
    assert work.chosen == 2 / 8
    assert work.read + work.experts == work.parameters
    one = work.count_sampling_bytes(steps=1, tokens=1, attended=0, itemsize=2)
    assert one == pytest.approx(2 * (work.read + 0.25 * work.experts))
    three = work.count_sampling_bytes(steps=1, tokens=3, attended=0, itemsize=2)
    assert three == pytest.approx(2 * (work.read + (1 - 0.75**3) * work.experts))
    many = work.count_sampling_bytes(steps=1, tokens=1000, attended=0, itemsize=2)
    assert many == pytest.approx(2 * work.parameters)
