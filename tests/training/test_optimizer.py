import numpy as np
import pytest
import torch
from torch import nn

from rl.training.muon import Muon, MuonConfig, orthogonalize
from rl.training.optimizer import Optimizer
from rl.types import OptimParams
from tests.training.layouts import whole_parameters
from tests.training.parts import engine_config, make_samples, small_spec

ADAMW_NAMES = ("embed_tokens.weight", "norm.weight")


def one_parameter(value, gradient):
    parameter = nn.Parameter(torch.tensor(value))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize(("name", "expected"), [("AdamW", 2.0 - 0.1 * 0.5 * 2.0 + 0.1), ("Adam", 2.0 - 0.1)])
def test_adamw_decays_separately_from_the_gradient_and_adam_within_it(name, expected):
    # The first step is lr times the gradient's sign: -3, and with Adam's decay -3 + 2 * 2 = 1.
    weight_decay = {"AdamW": 0.5, "Adam": 2.0}[name]
    parameter = one_parameter([2.0], [-3.0])
    config = Optimizer.Config(name=name, lr=0.1, eps=0.0, weight_decay=weight_decay)
    optimizer = config.build(parameters={"norm.weight": parameter})
    optimizer.step(optimizer.settings(lr=0.1))
    assert parameter.item() == pytest.approx(expected)


def test_muon_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match=r"momentum=0\.9, .* has no effect with name='AdamW'"):
        Optimizer.Config(muon=MuonConfig(momentum=0.9))
    edited = Optimizer.Config()
    edited.muon.lr_ratio = 2.0
    with pytest.raises(ValueError, match=r"lr_ratio=2\.0, .* has no effect"):
        edited.build(parameters={"norm.weight": one_parameter([2.0], [1.0])})
    Optimizer.Config(name="Muon", muon=MuonConfig(momentum=0.9))


@pytest.mark.parametrize(
    ("field", "value"), [("momentum", 1.0), ("num_iterations", 0), ("lr_ratio", -1.0), ("lr_ratio", np.inf)]
)
def test_muon_setting_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        MuonConfig(**{field: value})


def test_iteration_applies_the_quintic_to_each_singular_value():
    # Divided by the norm 5: 0.6 and 0.8; p(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5.
    once = orthogonalize(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), num_iterations=1)
    torch.testing.assert_close(once, torch.diag(torch.tensor([1.19327, 0.97648])), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_orthogonalization_sets_singular_values_near_one_and_keeps_vectors(shape):
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    values = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    u, vh = u[:, :6], vh[:6]
    x = u.T @ orthogonalize(u * values @ vh, num_iterations=5) @ vh.T
    assert (x - x.diagonal().diag()).norm() < 1e-5
    assert ((x.diagonal() > 0.67) & (x.diagonal() < 1.21)).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_plain_matrices_step_like_pytorchs_muon(nesterov, scale):
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


def muon_engine(assets, parallelism=None, *, compute_dtype="float32", converters=()):
    config = engine_config(parallelism=parallelism)
    config.converters = converters
    config.optimizer.name = "Muon"
    # Products in bfloat16 would turn rounding of a sum's last bits into differences of 2^-9.
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


def test_matrices_of_a_fused_weight_step_alone_and_the_rest_with_adamw(assets):
    engine = muon_engine(assets, compute_dtype="bfloat16")  # as PyTorch's Muon
    adapter = small_spec().adapter(small_spec().model)
    before = whole_parameters(engine)
    engine.forward_backward(make_samples())
    # Too large to clip: the step's gradient is the sum over the denominator.
    denominator = engine._gradient.denominator
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


def test_momentum_of_one_step_is_accepted_by_muon_only(assets):
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
