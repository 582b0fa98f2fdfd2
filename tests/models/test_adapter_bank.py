"""Many adapters beside one model: each row has the products of its own, with the bits that the
trainer computes. Mixtures have no batch-invariant products, and are compared as numbers.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.sharding import local_tensor, slice_local_shard
from rl.models.batch_invariant.model import make_batch_invariant, pad_rows
from rl.models.decoder import reset_buffers
from rl.models.layers.attention import SequenceLayout
from rl.models.layers.moe import GroupedExperts
from rl.models.lora import LoRA
from rl.models.low_rank.bank import AdapterBank
from rl.models.low_rank.plain_bank import PlainBank
from rl.models.low_rank.products import PackedFactors, Tiles, add_products
from rl.models.low_rank.shapes import AdapterShapes
from rl.models.low_rank.types import HEAD, NONE
from rl.models.parallelize import ShardedLinear, parallelize_decoder_generator
from rl.models.spec import model_spec
from tests.support.distributed import run_ranks
from tests.support.policies import random_model, small_spec

SPEC = replace(model_spec("qwen3", "tiny"), batch_invariant=True)
MIXTURE = small_spec(experts=True, tie=False)
CPU = torch.device("cpu")


def make_model(spec=SPEC, dtype=torch.float32):
    model = spec.model.build().to(dtype)
    make_batch_invariant(model, spec=spec, device=CPU)
    model.init_weights(seed=0)
    reset_buffers(model)
    return model.requires_grad_(False)


def list_layers(model):
    kinds = torch.nn.Linear, ShardedLinear, GroupedExperts
    return {n: m for n, m in model.named_modules() if isinstance(m, kinds) and n != "lm_head"}


def draw_factors(spec, lora, *, seed, dtype=torch.float32, mesh=None):
    shapes = AdapterShapes(spec, lora, mesh=mesh)
    tensors = shapes.allocate(dtype, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        whole = 0.1 * torch.randn(tensor.shape, generator=generator)
        local_tensor(tensor).copy_(slice_local_shard(whole, tensor))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_and_columns_that_fill_no_tile(dtype):
    """One to nine rows, and runs of columns that begin and end anywhere, against float64; NaN and
    infinity stay what they are.
    """
    generator = torch.Generator().manual_seed(0)
    x, out = (torch.randn(9, n, generator=generator).to(dtype) for n in (21, 75))
    for column, number in ((3, torch.nan), (4, torch.inf), (36, torch.nan), (60, -torch.inf)):
        out[[0, 8], column] = number
    a, b = (torch.randn(n, m, generator=generator).to(dtype) for n, m in ((21, 8), (3, 75)))
    runs = np.array([[0, 37, 0], [38, 59, 1], [60, 61, 0]], dtype=np.int64)
    packed = PackedFactors(a=a, b=b, runs=runs, work=1)
    table, scale = np.array([packed.entry], dtype=np.int64), np.float32(0.5)
    low = x.double() @ a.double()
    expected = out.double()
    for begin, end, product in runs.tolist():
        expected[:, begin:end] += 0.5 * low[:, 3 * product :][:, :3] @ b[:, begin:end].double()

    def add(num_rows):
        added = out[:num_rows].clone()
        tiles = Tiles.of_all(num_rows)
        add_products(x[:num_rows], added, tiles, table, np.array([scale]), work=1)
        return added

    whole = add(9)
    torch.testing.assert_close(whole, expected.to(dtype), atol=1e-5, rtol=1e-5, equal_nan=True)
    for untouched in (37, 59, *range(61, 75)):
        assert torch.equal(whole[:, untouched], out[:, untouched])
    for num_rows in range(1, 9):
        torch.testing.assert_close(add(num_rows), whole[:num_rows], atol=0, rtol=0, equal_nan=True)


LORAS = {
    NONE: None,
    10: LoRA.Config(rank=1, alpha=2.0),
    11: LoRA.Config(rank=8, target_modules=("q_proj", "up_proj")),
    12: LoRA.Config(rank=16, alpha=4.0, target_modules=("gate_proj", "down_proj")),
    13: LoRA.Config(rank=64),
}
BATCH = ((11, 3), (NONE, 10), (10, 1), (12, 17), (11, 24), (13, 31))
"""Version and length of each sequence."""


def draw_sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(64, (length,), generator=generator) for _, length in BATCH]


def make_bank(model, spec, mesh=None):
    bank = AdapterBank(list_layers(model), dtype=torch.float32)
    for version, lora in LORAS.items():
        if lora is not None:
            bank.load(version, draw_factors(spec, lora, seed=version, mesh=mesh))
    return bank


@torch.no_grad()
def run_batch(model, bank, versions, sequences):
    lengths = [len(ids) for ids in sequences]
    bank.begin(np.repeat(versions, lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = SequenceLayout.from_lengths(lengths)
    return model(torch.cat(sequences), positions=positions, sequences=layout).split(lengths)


@torch.no_grad()
def add_to_weights(model, factors):
    """Add s B A to the weights, which may be stacks of experts."""
    parameters = dict(model.named_parameters())
    for name, of_layer in factors.items():
        weight = parameters.get(name, parameters.get(f"{name}.weight"))
        spread = of_layer.layer.spread_by_source(of_layer.b, of_layer.rows_ON)
        weight += of_layer.layer.scale * spread @ of_layer.a
    return model


@pytest.mark.parametrize("kind", [AdapterBank, PlainBank])
def test_adapter_for_a_layer_that_takes_none_is_refused(kind):
    bank = kind(list_layers(make_model()), dtype=torch.float32)
    of_layer = draw_factors(SPEC, LoRA.Config(rank=2), seed=1)["layers.0.attention.o_proj"]
    says = r"has factors for layers\.9\.attention\.o_proj, which takes none here: must be of"
    with pytest.raises(ValueError, match=says):
        bank.load(1, {"layers.9.attention.o_proj": of_layer})
    assert 1 not in bank.versions


def test_rows_of_a_mixture_have_the_products_of_their_adapter_and_expert():
    """Five adapters of different ranks and targets in one batch, and a sequence without one."""
    model, sequences = random_model(MIXTURE, seed=0), draw_sequences()
    bank = make_bank(model, MIXTURE)
    together = run_batch(model, bank, [version for version, _ in BATCH], sequences)
    for (version, _), ids, part in zip(BATCH, sequences, together, strict=True):
        [alone] = run_batch(model, bank, [version], [ids])
        # As near as without adapters: the base's products depend on the other rows.
        assert (part - alone).norm() <= 1e-6 * alone.norm()
        summed = random_model(MIXTURE, seed=0)
        if version != NONE:
            lora = LORAS[version]
            add_to_weights(summed, draw_factors(MIXTURE, lora, seed=version))
        [expected] = run_batch(summed, AdapterBank({}, dtype=torch.float32), [NONE], [ids])
        torch.testing.assert_close(part, expected, atol=2e-5, rtol=1e-5)


def run_on_ranks():
    use_one_gloo_worker()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results = {}
    for spec in (small_spec(), MIXTURE):
        model = parallelize_decoder_generator(random_model(spec, seed=0), mesh)
        bank = make_bank(model, spec, mesh)
        parts = run_batch(model, bank, [version for version, _ in BATCH], draw_sequences())
        results[spec.name] = [part.numpy() for part in parts]
    dist.destroy_process_group()
    return results


@pytest.mark.medium
def test_two_tensor_parallel_ranks_add_the_products_of_one():
    ranks = run_ranks(run_on_ranks, 2, timeout_s=100)
    for spec in (small_spec(), MIXTURE):
        model = random_model(spec, seed=0)
        bank = make_bank(model, spec)
        expected = run_batch(model, bank, [version for version, _ in BATCH], draw_sequences())
        for rank in ranks:
            for part, wanted in zip(rank[spec.name], expected, strict=True):
                np.testing.assert_allclose(part, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [small_spec(tie=False), MIXTURE], ids=["dense", "experts"])
@torch.no_grad()
def test_plain_bank_computes_what_the_kernel_computes(spec):
    """Fused weights of which some are adapted, several ranks, and rows without an adapter."""
    loras = {
        5: LoRA.Config(rank=4, target_modules=("q_proj", "v_proj", "down_proj")),
        9: LoRA.Config(rank=16, alpha=4.0, unembedding=True),
    }
    versions = np.repeat([5, NONE, 9, 5], [3, 2, 6, 1])
    lengths = [3, 2, 6, 1]
    ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.from_lengths(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    results = []
    for kind in (AdapterBank, PlainBank):
        model = random_model(spec, seed=0).requires_grad_(False)
        bank = kind(list_layers(model), dtype=torch.float32, head_dtype=torch.float32)
        plain = model(ids, positions=positions, sequences=layout)
        for version, lora in loras.items():
            bank.load(version, draw_factors(spec, lora, seed=version))
        bank.begin(versions)
        hidden = model(ids, positions=positions, sequences=layout)
        logits = torch.zeros(12, model.config.vocab_size)
        bank.add_to_rows(HEAD, hidden, logits, versions)
        assert [bool(row.any()) for row in logits] == (versions == 9).tolist()
        torch.testing.assert_close(hidden[3:5], plain[3:5])
        assert not torch.allclose(hidden[:3], plain[:3], atol=1e-3)
        results.append(torch.cat((hidden, logits), dim=1))
        bank.drop(5)
        with pytest.raises(KeyError):
            bank.begin(versions)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
