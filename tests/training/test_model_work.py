"""Counted from shapes, against what PyTorch counts while a model computes."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models import qwen3_moe
from rl.models.attention import SequenceLayout
from rl.models.converters.converter import ModelConverters
from rl.models.converters.lora import LoRA
from rl.models.qwen3 import model_registry
from rl.models.qwen3.model import Qwen3, linear_head
from rl.models.spec import ModelSpec
from rl.training.model_work import model_work

LENGTHS = [24, 24]
NUM_TOKENS = sum(LENGTHS)
SEEN = sum(n * n for n in LENGTHS)
"""On a CPU the hidden half of a causal grid is computed too."""


def sizes(spec: ModelSpec) -> Qwen3.Config:
    assert isinstance(spec.model, Qwen3.Config)
    return spec.model


def operations(spec):
    """Forward and backward, of products and of attention."""
    model = spec.model.build()
    model.init_weights(seed=0)
    tokens = torch.arange(NUM_TOKENS) % spec.model.vocab_size

    def forward():
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        sequences = SequenceLayout.from_lengths(LENGTHS)
        return model(tokens, positions=positions, sequences=sequences, head=linear_head)

    counts = []
    for backward in (False, True):
        # The kernel that a CPU has for attention is counted by nobody.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if backward:
                forward().square().sum().backward()
            else:
                forward()
        by_name = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
        attention = sum(n for name, n in by_name.items() if "attention" in name or "bmm" in name)
        counts.append((sum(by_name.values()) - attention, attention))
    return counts


def test_a_dense_models_operations_are_those_that_pytorch_counts():
    spec = model_registry("tiny")
    work = model_work(sizes(spec))
    (forward, attention), (both, both_attention) = operations(spec)
    assert work.sampling_flops(tokens=NUM_TOKENS, attended=0) == forward
    assert work.sampling_flops(tokens=0, attended=SEEN) == attention
    assert work.training_flops(tokens=NUM_TOKENS, attended=0) == both
    assert work.training_flops(tokens=0, attended=SEEN) == both_attention


def test_a_mixtures_operations_are_those_of_the_experts_that_are_chosen():
    spec = qwen3_moe.model_registry("tiny")
    (forward, _), (both, _) = operations(spec)
    work = model_work(sizes(spec))
    assert work.sampling_flops(tokens=NUM_TOKENS, attended=0) == forward
    assert work.training_flops(tokens=NUM_TOKENS, attended=0) == both


def test_sizes_of_the_registry_are_counted_without_memory():
    dense = model_work(sizes(model_registry("32B")))
    assert dense.parameters == pytest.approx(32.76e9, rel=1e-3)
    table = 151_936 * 5120
    assert dense.products == dense.trained
    assert dense.parameters - dense.products - table == 64 * (2 * 5120 + 2 * 128) + 5120  # norms
    assert (dense.attention, dense.cached) == (64 * 64 * 128, 2 * 64 * 8 * 128)
    mixture = model_work(sizes(qwen3_moe.model_registry("30B-A3B")))
    assert mixture.parameters == pytest.approx(30.5e9, rel=2e-3)
    assert mixture.products == pytest.approx(3.0e9, rel=0.05)  # its name says so


def test_what_adapters_train_has_a_gradient_and_the_rest_has_none():
    spec = model_registry("tiny")
    degrees = ParallelismConfig().degrees(1)
    assert isinstance(degrees, Degrees)
    converters = ModelConverters(
        (LoRA.Config(rank=4),), spec=spec, degrees=degrees, device=torch.device("cpu")
    )
    with torch.device("meta"):
        module = spec.model.build()
        converters.convert(module)
    plain, adapted = model_work(sizes(spec)), model_work(sizes(spec), converted=module)
    assert adapted.trained == adapted.parameters - plain.parameters
    assert adapted.products == plain.products + adapted.trained
    full = plain.training_flops(tokens=1, attended=0)
    assert adapted.training_flops(tokens=1, attended=0) == pytest.approx(2 / 3 * full, rel=0.2)


def test_decoding_reads_weights_once_a_step_and_the_cache_once_a_token():
    work = model_work(sizes(model_registry("tiny")))
    read = work.sampling_bytes(steps=3, tokens=12, attended=100, itemsize=4)
    assert work.read == work.parameters  # the output head is the embedding
    assert read == 4 * (3 * work.parameters + 100 * 2 * 3 * 4 * 32)


def test_decoding_reads_the_experts_that_a_steps_tokens_choose():
    work = model_work(sizes(qwen3_moe.model_registry("tiny")))
    assert work.chosen == 2 / 8
    assert work.read + work.experts == work.parameters
    one = work.sampling_bytes(steps=1, tokens=1, attended=0, itemsize=2)
    assert one == pytest.approx(2 * (work.read + 0.25 * work.experts))
    three = work.sampling_bytes(steps=1, tokens=3, attended=0, itemsize=2)
    assert three == pytest.approx(2 * (work.read + (1 - 0.75**3) * work.experts))
    many = work.sampling_bytes(steps=1, tokens=1000, attended=0, itemsize=2)
    assert many == pytest.approx(2 * work.parameters)
