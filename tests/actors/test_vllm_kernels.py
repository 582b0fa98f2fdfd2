"""vLLM's kernels give what PyTorch's give in the same layers, up to rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl.models.decoder import Attention, Decoder, RMSNorm
from rl.models.rope import rotate
from tests.support.policies import small_spec

pytestmark = pytest.mark.medium
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def kernels():
    from actors.vllm import kernels

    return kernels


def assert_as_exact(ours, theirs, exact):
    """Assert that the error is at most twice that of PyTorch's kernel, or within float32's rounding."""
    bound = max(2 * (theirs - exact).abs().max().item(), 1e-5)
    assert (ours - exact).abs().max() <= bound


@dtypes
def test_norm_and_rotation_are_as_exact_as_pytorchs(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    x_THD = torch.randn(7, 6, 64, generator=generator).to(dtype)
    norm = RMSNorm(64, eps=1e-3, dtype=dtype).requires_grad_(False)
    norm.weight.normal_(generator=generator)
    heads = x_THD[:, ::2]  # as the key heads of a fused projection lie
    exact = F.rms_norm(heads.float(), (64,), norm.weight.float(), 1e-3)
    assert_as_exact(kernels.Norm(norm)(heads), norm(heads), exact)

    rotation = kernels.Rotation()
    for _ in range(2):  # another forward has other angles
        angles = torch.randn(7, 1, 32, generator=generator).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for heads in (x_THD, x_THD[:, ::3]):
            exact = rotate(heads.float(), cos.float(), sin.float())
            assert_as_exact(rotation(heads.clone(), cos, sin), rotate(heads, cos, sin), exact)


@dtypes
@pytest.mark.parametrize("shape", [(48, 64), (30, 36)], ids=["tiles", "odd"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_packed_product_is_of_the_weights_at_the_last_pack(kernels, dtype, shape, bias):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype).requires_grad_(False)
    layer = kernels.PackedLinear(linear.weight, linear.bias)
    x = torch.randn(5, shape[1], generator=generator).to(dtype)
    for _ in range(2):
        linear.weight.normal_(generator=generator)
        layer.pack()
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(layer(x), linear(x), atol=tolerance, rtol=tolerance)
    packed = layer(x)
    linear.weight.zero_()
    assert torch.equal(layer(x), packed)
    layer.unpack()
    assert not (layer(x) - (linear.bias if bias else 0)).any()


def test_every_layer_but_narrow_norms_is_replaced_and_keeps_its_parameters(kernels):
    model: Decoder = small_spec().model.build()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    kernels.use_kernels(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    kept = [module for module in model.modules() if type(module) in (nn.Linear, RMSNorm)]
    assert {layer.normalized_shape for layer in kept} == {(8,)}  # norms of narrow heads
    assert all(module.rotate is not rotate for module in model.modules() if isinstance(module, Attention))


def test_norm_of_a_width_that_vllms_cannot_do_stays_pytorchs(kernels):
    model = nn.ModuleDict({"narrow": RMSNorm(36, eps=1e-6), "wide": RMSNorm(48, eps=1e-6)}).requires_grad_(
        False
    )
    kernels.use_kernels(model)
    assert [type(layer) for layer in model.values()] == [RMSNorm, kernels.Norm]
    for width, layer in ((36, model["narrow"]), (48, model["wide"])):
        assert layer(torch.ones(1, width)).isfinite().all()
