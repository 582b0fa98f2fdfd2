import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from rl.distributed.mesh import ParallelismConfig
from rl.models.converters.lora import ALL_LINEAR, LoRA
from rl.training.muon import Muon, MuonConfig, orthogonalize
from rl.training.optimizer import Optimizer
from rl.types import OptimParams
from tests.support.distributed import run_ranks
from tests.training.layouts import whole_parameters
from tests.training.parts import engine_config, make_samples, small_spec, write_assets

ADAMW_NAMES = ("embed_tokens.weight", "norm.weight")


def one_parameter(value, gradient):
    parameter = nn.Parameter(torch.tensor(value))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize(("name", "expected"), [("AdamW", 2.0 - 0.1 * 0.5 * 2.0 + 0.1), ("Adam", 2.0 - 0.1)])
def test_adamw_decays_apart_from_the_gradient_and_adam_within_it(name, expected):
    # The first step is lr times the gradient's sign: -3, and with Adam's decay -3 + 2 * 2 = 1.
    weight_decay = {"AdamW": 0.5, "Adam": 2.0}[name]
    parameter = one_parameter([2.0], [-3.0])
    config = Optimizer.Config(name=name, lr=0.1, eps=0.0, weight_decay=weight_decay)
    optimizer = config.build(parameters={"norm.weight": parameter})
    optimizer.step(optimizer.settings(lr=0.1))
    assert parameter.item() == pytest.approx(expected)


def test_step_in_backward_is_refused_because_of_division_and_clipping():
    with pytest.raises(ValueError, match=r"early_step_in_backward=True: must be False: .*divides.*clips"):
        Optimizer.Config(early_step_in_backward=True)


def test_settings_of_muon_are_refused_where_they_have_no_effect():
    with pytest.raises(ValueError, match=r"muon\.momentum=0\.9 has no effect with name='AdamW'"):
        Optimizer.Config(muon=MuonConfig(momentum=0.9))
    edited = Optimizer.Config()
    edited.muon.lr_ratio = 2.0
    with pytest.raises(ValueError, match=r"muon\.lr_ratio=2\.0 has no effect"):
        edited.build(parameters={"norm.weight": one_parameter([2.0], [1.0])})
    Optimizer.Config(name="Muon", muon=MuonConfig(momentum=0.9))


@pytest.mark.parametrize(
    ("field", "value"), [("momentum", 1.0), ("num_iterations", 0), ("lr_ratio", -1.0), ("lr_ratio", np.inf)]
)
def test_setting_of_muon_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        MuonConfig(**{field: value})


def test_iteration_takes_each_singular_value_through_the_quintic():
    # Divided by the norm 5: 0.6 and 0.8; p(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5.
    once = orthogonalize(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), num_iterations=1)
    torch.testing.assert_close(once, torch.diag(torch.tensor([1.19327, 0.97648])), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape):
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    values = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    u, vh = u[:, :6], vh[:6]
    x = u.T @ orthogonalize(u * values @ vh, num_iterations=5) @ vh.T
    assert (x - x.diagonal().diag()).norm() < 1e-5
    assert ((x.diagonal() > 0.67) & (x.diagonal() < 1.21)).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_plain_matrices_take_the_steps_of_pytorchs_muon(nesterov, scale):
    generator = torch.Generator().manual_seed(2)
    ours = nn.Parameter(torch.randn(24, 10, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    muon = Muon(
        config=MuonConfig(nesterov=nesterov, scale=scale, lr_ratio=0.5),
        parameters={"layers.0.attention.o_proj.weight": ours},
        adapter=None,
    )
    reference = torch.optim.Muon(
        [theirs], lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
    )
    for _ in range(3):
        ours.grad = torch.randn(24, 10, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step(lr=0.1, weight_decay=0.1, momentum=0.9)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def muon_engine(assets, parallelism=None, *, compute_dtype="float32", converters=()):
    config = engine_config(parallelism=parallelism)
    config.converters = converters
    config.optimizer.name = "Muon"
    # Products in bfloat16 would turn rounding of the last bits of a sum into differences of 2^-9.
    config.optimizer.muon.compute_dtype = compute_dtype
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def train(engine, num_steps=3, params=None):
    for _ in range(num_steps):
        engine.forward_backward(make_samples())
        engine.optim_step(params)


def stepped_alone(optimizer, tensor, gradient):
    parameter = nn.Parameter(tensor.clone())
    parameter.grad = gradient
    optimizer([parameter]).step()
    return parameter.detach()


def test_every_matrix_of_a_fused_weight_steps_alone_and_the_rest_with_adamw(assets):
    engine = muon_engine(assets, compute_dtype="bfloat16")  # as PyTorch's
    adapter = small_spec().adapter(small_spec().model)
    before = whole_parameters(engine)
    engine.forward_backward(make_samples())
    # So large that nothing is clipped: the step's gradient is the sum over the denominator.
    denominator = engine._step.denominator
    gradients = {name: p.grad / denominator for name, p in engine.policy.parameters.items()}
    engine.optim_step(OptimParams(max_norm=np.inf))

    def muon(parameters):
        return torch.optim.Muon(
            parameters, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)

    num_matrices = 0
    for name, after in whole_parameters(engine).items():
        is_adamw = name in ADAMW_NAMES or name.endswith("norm.weight")
        parts = [adapter.to_hf(name, torch.from_numpy(x)) for x in (before[name], gradients[name].numpy())]
        expected = [
            stepped_alone(adamw if is_adamw else muon, parts[0][key], parts[1][key]) for key in parts[0]
        ]
        num_matrices += 0 if is_adamw else len(expected)
        change = torch.from_numpy(after - before[name])
        wanted = adapter.from_hf(name, expected) - torch.from_numpy(before[name])
        assert (change - wanted).norm() <= (1e-5 if is_adamw else 5e-3) * wanted.norm(), name
    assert num_matrices == 2 * 7  # q, k, v, o, gate, up and down of each layer


def test_fused_weight_stepped_as_one_matrix_would_be_another_step(assets):
    adapter = small_spec().adapter(small_spec().model)
    name = "layers.0.attention.qkv_proj.weight"
    whole = torch.randn(48, 36, generator=torch.Generator().manual_seed(0))
    apart, together = (
        Muon(config=MuonConfig(), parameters={}, adapter=a)._orthogonalized(name, whole)
        for a in (adapter, None)
    )
    assert (apart - together).norm() > 0.1 * apart.norm()


@pytest.mark.parametrize("targets", [ALL_LINEAR, ("q_proj", "v_proj", "down_proj")])
def test_factors_of_every_adapted_weight_step_alone(assets, targets):
    lora = LoRA.Config(rank=3, target_modules=targets)
    engine = muon_engine(assets, compute_dtype="bfloat16", converters=(lora,))  # as PyTorch's
    adapter = small_spec().adapter(small_spec().model)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in engine.policy.trained_parameters.items():
        if name.endswith("lora_b"):  # Zero, it would leave A without a gradient.
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    before = whole_parameters(engine)
    engine.forward_backward(make_samples())
    gradients = {n: p.grad / engine._step.denominator for n, p in engine.policy.trained_parameters.items()}
    engine.optim_step(OptimParams(max_norm=np.inf))

    def muon(parameters):
        return torch.optim.Muon(
            parameters, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    def parts(name, tensor):
        """By the last part of Hugging Face's name of the weight, those that have no A too."""
        base = name.replace("_lora.lora_a", ".weight").replace("_lora.lora_b", ".weight")
        leaves = [hf_name.split(".")[-2] for hf_name in adapter.hf_names(base)]
        if name.endswith("lora_b"):
            return dict(zip(leaves, adapter.to_hf(base, torch.as_tensor(tensor)).values(), strict=True))
        adapted = [leaf for leaf in leaves if leaf in targets]
        return dict(zip(adapted, torch.as_tensor(tensor).split(3), strict=True))

    num_matrices = 0
    after = whole_parameters(engine)
    for name in gradients:
        old, new, gradient = (parts(name, x[name]) for x in (before, after, gradients))
        for leaf in old:
            if leaf in targets:
                wanted = stepped_alone(muon, old[leaf], gradient[leaf].contiguous()) - old[leaf]
                num_matrices += 1
            else:
                wanted = -1e-2 * 0.1 * old[leaf]  # Rows of B without an A decay.
            assert (new[leaf] - old[leaf] - wanted).norm() <= 5e-3 * wanted.norm(), f"{name}, {leaf}"
    assert num_matrices == 2 * 2 * len(targets)  # A and B of each, in each layer


def test_momentum_of_one_step_can_be_given_to_muon_alone(assets):
    given, configured = muon_engine(assets), muon_engine(assets)
    configured.optimizer.config.muon.momentum = 0.5
    train(given, params=OptimParams(momentum=0.5))
    train(configured)
    for name, tensor in whole_parameters(given).items():
        np.testing.assert_array_equal(tensor, whole_parameters(configured)[name])
    given.forward_backward(make_samples())
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        given.optim_step(OptimParams(momentum=1.5))
    adam = engine_config().build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    adam.forward_backward(make_samples())
    with pytest.raises(ValueError, match=r"momentum=0\.5: is Muon's; optimizer\.name='AdamW' has betas"):
        adam.optim_step(OptimParams(momentum=0.5))


def test_run_with_muon_continues_from_its_checkpoint_with_the_same_bits(assets, tmp_path):
    engine = muon_engine(assets)
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    train(engine, 2)
    other = muon_engine(assets)
    train(other, 1)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    train(other, 2)
    for name, tensor in whole_parameters(engine).items():
        np.testing.assert_array_equal(tensor, whole_parameters(other)[name])


LAYOUTS = {
    "fsdp4": ParallelismConfig(data_parallel_shard_degree=4),
    "ddp4": ParallelismConfig(data_parallel_replicate_degree=4, data_parallel_shard_degree=1),
    "hsdp2x2": ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
    "fsdp2_tp2": ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    "fsdp2_cp2": ParallelismConfig(data_parallel_shard_degree=2, context_parallel_degree=2),
    "cp2_tp2": ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2),
}
WITH_LORA = ("fsdp4", "fsdp2_tp2")


LORA = (LoRA.Config(rank=3),)


def train_in_every_layout(assets):
    """[layout, converters] parameters after three steps with Muon, on this one of four ranks."""
    trained = {}
    for name, parallelism in LAYOUTS.items():
        for converters in ((), LORA) if name in WITH_LORA else ((),):
            engine = muon_engine(assets, dataclasses.replace(parallelism), converters=converters)
            train(engine)
            trained[name, bool(converters)] = whole_parameters(engine)
    return trained


def adam_parameters(assets, implementation, parallelism=None):
    config = engine_config(parallelism=parallelism)
    config.optimizer.implementation = implementation
    engine = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    train(engine)
    return whole_parameters(engine)


def step_by_each_implementation(assets):
    """[layout, implementation] parameters after three steps with AdamW, on this one of four ranks."""
    return {
        (name, implementation): adam_parameters(assets, implementation, dataclasses.replace(parallelism))
        for name, parallelism in LAYOUTS.items()
        if name not in ("ddp4", "hsdp2x2")
        for implementation in ("foreach", "for-loop")  # Fused is what every other test of layouts has.
    }


@pytest.mark.slow
def test_each_implementation_of_adam_steps_shards_as_whole_parameters(assets):
    expected = adam_parameters(assets, "fused")
    for rank in run_ranks(step_by_each_implementation, 4, assets, timeout_s=200):
        for case, parameters in rank.items():
            for name, tensor in parameters.items():
                difference = np.linalg.norm(tensor - expected[name])
                assert difference <= 1e-5 * np.linalg.norm(expected[name]), f"{case}, {name}"


@pytest.mark.slow
def test_muon_steps_sharded_matrices_as_whole_ones(assets):
    expected, moved = {}, {}
    for converters in ((), LORA):
        one = muon_engine(assets, converters=converters)
        start = whole_parameters(one)
        train(one)
        expected[bool(converters)] = whole_parameters(one)
        moved[bool(converters)] = {
            name: np.linalg.norm(tensor - start[name]) for name, tensor in whole_parameters(one).items()
        }
    ranks = run_ranks(train_in_every_layout, 4, assets, timeout_s=200)
    for layout, has_lora in ranks[0]:
        for rank in ranks:
            for name, tensor in rank[layout, has_lora].items():
                difference = np.linalg.norm(tensor - expected[has_lora][name])
                assert difference <= 1e-4 * moved[has_lora][name], f"{layout}, {has_lora}, {name}"
                np.testing.assert_array_equal(tensor, ranks[0][layout, has_lora][name])
    assert len(ranks[0]) == len(LAYOUTS) + len(WITH_LORA)
