"""Kernels on the GPU against their definitions, in float32 on the CPU or in plain PyTorch.

Shape legend: t packed tokens, H query heads, K key-value heads, D head size, E model width, N
experts, F feed-forward width, B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.models.layers.attention import PackedAttention, SequenceLayout
from rl.models.layers.moe import multiply_groups
from rl.models.layers.norm import RMSNorm
from rl.models.sampling import draw, process_logits
from rl.models.spec import model_spec
from rl.types import SamplingParams
from rl.weights.checksum import checksum
from tools.gpu_check.report import Report

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 16, 8, 128, 1024
LENGTHS = (5, 300, 1, 129, 64)
HALF = 2e-2
"""Rounding of bfloat16 in results of size 1."""


def kernels(report: Report) -> None:
    torch.manual_seed(0)
    whole = SequenceLayout.from_lengths(LENGTHS)
    _attention(report, "packed attention", whole)
    # A prompt of 40 tokens, and three answers that see it.
    answers = SequenceLayout.after_prefixes((40, 7, 30, 1), ((0, 0), (0, 40), (0, 40), (0, 40)))
    _attention(report, "attention to shared prompts", answers)
    # A row of 60 tokens, a second that leaves it after 40, and a third that leaves the second.
    rows = SequenceLayout.after_paths((60, 20, 9), ((), ((0, 40),), ((0, 40), (60, 67))))
    _attention(report, "attention to rows of an episode", rows)
    _attention(report, "attention in float32", answers, dtype=torch.float32, atol=1e-4)
    _norm(report)
    _grouped_products(report)
    if report.has_package("vllm", part="the generator's fused layers"):
        _fused_layers(report)
    _sampling(report)
    bits = torch.randn(37, 129).bfloat16()
    sums = [checksum(x, global_shape=(64, 200), offsets=(3, 7)) for x in (bits, bits.cuda())]
    report.same("a checksum", float(sums[0] != sums[1]), atol=0)


def _attention(
    report: Report,
    name: str,
    layout: SequenceLayout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    atol: float = HALF,
) -> None:
    """Compare output and gradients with the CPU's in float32."""
    num_tokens = layout.num_tokens
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    upstream = torch.randn(num_tokens, HEADS, HEAD_DIM)
    results = []
    for device, as_dtype in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = [x.to(device, as_dtype).requires_grad_() for x in inputs]
        out = PackedAttention()(*leaves, layout.to(device))
        gradients = torch.autograd.grad(out, leaves, upstream.to(device, as_dtype))
        results.append((out, *gradients))
    parts = ("", ", gradient of q", ", gradient of k", ", gradient of v")
    for part, wanted, got in zip(parts, *results, strict=True):
        size = max(1.0, wanted.abs().max().item())
        report.close(name + part, got.float() / size, wanted / size, atol=atol)


def _norm(report: Report) -> None:
    norm, x = RMSNorm(WIDTH, eps=1e-6), torch.randn(64, WIDTH)
    wanted = norm(x)
    report.close("RMS norm", norm.cuda()(x.cuda()), wanted, atol=1e-5)
    report.close(
        "RMS norm in bfloat16", norm.bfloat16()(x.cuda().bfloat16()).float(), wanted, atol=4e-2
    )


def _grouped_products(report: Report) -> None:
    ends = torch.tensor([3, 3, 67, 200])
    x_SE, weight_NFE = torch.randn(200, 256), torch.randn(4, 128, 256) / 16
    wanted = torch.cat(
        [x_SE[a:b] @ w.T for a, b, w in zip((0, 3, 3, 67), ends, weight_NFE, strict=True)]
    )
    got = multiply_groups(x_SE.cuda().bfloat16(), weight_NFE.cuda().bfloat16(), ends.cuda())
    report.close("grouped products", got.float(), wanted, atol=5e-2)


def _fused_layers(report: Report) -> None:
    """Compare the kernels of decoding with the trainer's modules, with norms of queries and keys
    and without.
    """
    from actors.vllm.kernels import run_both_kernels

    for family, flavor in (("qwen3", "0.6B"), ("llama", "SmolLM2-135M")):
        spec = model_spec(family, flavor)
        spec.model.num_layers, spec.model.vocab_size = 2, 1000
        model = spec.model.build()
        model.init_weights(seed=0)
        model = model.to("cuda", torch.bfloat16)
        layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).cuda()
        ids = torch.arange(layout.num_tokens, device="cuda") * 7 % 1000
        wanted, got = run_both_kernels(model, ids, positions=positions, sequences=layout)
        difference = (
            (got.float() - wanted.float()).abs().mean().item()
        )  # logits of bfloat16 weights
        report.same(f"fused layers of {flavor}", difference, atol=0.03)


def _sampling(report: Report) -> None:
    """Drawn tokens differ only where the random number falls on the border of two tokens."""
    logits_BV, uniforms_B = torch.randn(256, 5000) * 3, torch.rand(256, dtype=torch.float64)
    for name, sampling in (
        ("sampling", SamplingParams(max_tokens=1)),
        (
            "sampling with top-p and top-k",
            SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, top_k=50),
        ),
    ):
        tokens: list[Tensor] = []
        for device in ("cpu", "cuda"):
            logprobs_BV = process_logits(logits_BV.to(device), sampling)
            tokens.append(draw(logprobs_BV, uniforms_B.to(device)).cpu())
        report.same(name, (tokens[0] != tokens[1]).float().mean().item(), atol=0.01)
    greedy = F.one_hot(torch.arange(8), 16).float() * 9
    report.close("greedy sampling", greedy.cuda().argmax(-1).cpu(), torch.arange(8), atol=0)
