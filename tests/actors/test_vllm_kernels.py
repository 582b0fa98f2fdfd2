"""vLLM's kernels give what PyTorch's give in the same layers, up to rounding."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import examples.custom_model  # noqa: F401 registers the family granite
from actors.vllm import compat
from rl.models import decoder
from rl.models.decoder import Attention, Decoder
from rl.models.layers.attention import SequenceLayout
from rl.models.layers.norm import RMSNorm
from rl.models.layers.rope import rotate
from tests.support.policies import random_model, small_spec

pytestmark = pytest.mark.medium
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def kernels():
    from actors.vllm import kernels

    return kernels


def assert_as_exact(ours, theirs, exact):
    """Assert that the error is at most twice that of PyTorch's kernel, or within float32's
    rounding.
    """
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


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_processor_without_a_product_in_16_bits_multiplies_in_float32(kernels, bias, monkeypatch):
    # As on processors without AVX-512; ONEDNN_MAX_CPU_ISA=AVX2 makes any processor such a one.
    ops = compat.import_custom_ops()
    make = ops.create_onednn_mm

    def refuse_16_bits(weight, *sizes):
        if weight.dtype != torch.float32:
            raise RuntimeError("could not create a primitive descriptor")
        return make(weight, *sizes)

    monkeypatch.setattr(ops, "create_onednn_mm", refuse_16_bits)
    # Without its memory of this processor.
    monkeypatch.setattr(compat, "can_multiply", compat.can_multiply.__wrapped__)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    layer = kernels.PackedLinear(linear.weight, linear.bias)
    layer.pack()
    x = torch.randn(5, 64, generator=generator).bfloat16()
    exact = copy.deepcopy(linear).double()(x.double())
    assert_as_exact(layer(x), linear(x), exact)
    assert layer(x).dtype == torch.bfloat16


def test_packed_head_in_float32_returns_logits_that_are_not_rounded(kernels):
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((48, 64), (5, 64))
    )
    head = kernels.PackedLinear(weight, in_float32=True)
    exact = x.double() @ weight.double().T
    for pack in (lambda: None, head.pack, head.unpack):
        pack()
        assert head(x).dtype == torch.float32
        torch.testing.assert_close(head(x).double(), exact, atol=1e-4, rtol=0)


def test_every_layer_but_narrow_norms_is_replaced_and_keeps_its_parameters(kernels):
    model: Decoder = small_spec().model.build()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    kernels.use_kernels(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    kept = [module for module in model.modules() if type(module) in (nn.Linear, RMSNorm)]
    assert {layer.normalized_shape for layer in kept} == {(8,)}  # norms of narrow heads
    assert all(
        module.rotate is not rotate for module in model.modules() if isinstance(module, Attention)
    )


def normalize_and_rotate(
    qkv, num_q, num_k, num_v, dim, eps, q_weight, k_weight, table, is_neox, rows
):
    """Do what the GPU's kernel `fused_qk_norm_rope` does, with the functions by which vLLM defines
    its parts.
    """
    from vllm import ir
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    heads = qkv.view(len(qkv), -1, dim)
    assert all(x.is_contiguous() for x in (qkv, table, rows))
    assert heads.size(1) == num_q + num_k + num_v
    q, k, _ = heads.split((num_q, num_k, num_v), dim=1)
    inputs = (ir.ops.rms_norm(x, w, eps).flatten(1) for x, w in ((q, q_weight), (k, k_weight)))
    rotated = RotaryEmbedding.forward_static(rows, *inputs, dim, dim, table, is_neox)
    q.copy_(rotated[0].view_as(q))
    k.copy_(rotated[1].view_as(k))


@dtypes
@pytest.mark.parametrize(
    ("family", "head_dim", "calls"),
    [
        ("qwen3", 64, {torch.float32: [6, 4, 0], torch.bfloat16: [6, 0, 4]}),
        ("qwen3", 32, [6, 4, 0]),
        ("llama", 64, [6, 4, 0]),
        ("gemma3_text", 64, [0, 4, 0]),
        ("granite", 64, [0, 4, 0]),
    ],
)
def test_kernels_of_a_gpu_give_the_trainers_hidden_states(
    kernels, monkeypatch, dtype, family, head_dim, calls
):
    """In two forwards of two layers: additions by norms, and one rotation a layer, which may
    normalize too.
    """
    counts: Counter[str] = Counter()

    def counted(name, kernel):
        def call(*args):
            counts[name] += 1
            return kernel(*args)

        monkeypatch.setattr(kernels.ops, name, call)

    counted("fused_add_rms_norm", kernels.ops.fused_add_rms_norm)
    counted("rotary_embedding", kernels.ops.rotary_embedding)
    counted("fused_qk_norm_rope", normalize_and_rotate)
    monkeypatch.setattr(kernels, "HAS_FUSED_HEADS", True)

    spec = small_spec(family=family, head_dim=head_dim, num_heads=6, hidden_dim=96)
    model = random_model(spec, seed=0).to(dtype).requires_grad_(False)
    ids = torch.arange(24) * 5 % 64
    inputs = {
        "positions": torch.arange(24) % 12,
        "sequences": SequenceLayout.from_lengths([12, 12]),
    }
    theirs, ours = kernels.run_both_kernels(model, ids, **inputs)
    one = {"positions": torch.arange(1), "sequences": SequenceLayout.from_lengths([1])}
    torch.testing.assert_close(
        kernels.run_both_kernels(model, ids[:1], **one)[1], ours[:1], atol=0.05, rtol=0.05
    )
    assert_as_exact(ours.float(), theirs.float(), model.float()(ids, **inputs))
    names = ("fused_add_rms_norm", "rotary_embedding", "fused_qk_norm_rope")
    expected = calls[dtype] if isinstance(calls, dict) else calls
    assert [counts[name] for name in names] == expected


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gated_activations_are_as_vllm_defines_them(kernels, kind):
    from vllm.model_executor.layers.activation import SiluAndMul

    x_TK2W = torch.randn(5, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    out = getattr(kernels, kind)(x_TK2W)
    torch.testing.assert_close(out, getattr(decoder, kind)(x_TK2W), atol=1e-6, rtol=1e-6)
    if kind == "swiglu":
        torch.testing.assert_close(out, SiluAndMul.forward_native(x_TK2W.flatten(2)).flatten(1))


def test_norm_of_a_width_that_vllms_cannot_do_stays_pytorchs(kernels):
    model = nn.ModuleDict(
        {"narrow": RMSNorm(36, eps=1e-6), "wide": RMSNorm(48, eps=1e-6)}
    ).requires_grad_(False)
    kernels.use_kernels(model)
    assert [type(layer) for layer in model.values()] == [RMSNorm, kernels.Norm]
    for width, layer in ((36, model["narrow"]), (48, model["wide"])):
        assert layer(torch.ones(1, width)).isfinite().all()
