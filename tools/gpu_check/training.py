"""The training engine on one GPU: numbers against the CPU, memory beside its estimate, speed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.compile import CompileConfig
from rl.models.files.hf import write_random_model
from rl.models.model_cost import count_work
from rl.models.spec import ModelSpec, model_spec
from rl.observability.machine import measure_limits
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.memory import MARGIN, estimate_memory
from rl.types import TrainingSample
from tools.gpu_check.report import Report

LEAST_MFU = 0.3
"""Share of the measured rate of matrix products."""
LAYERS_ON_CPU = 2
LENGTHS_ON_CPU = (96, 33, 64)
LENGTHS = (1024,) * 16
TOKENS_PER_GB = 100
"""Of a micro-batch, by the GPU's memory."""
MOST_TOKENS = 8192
LOSS_ATOL, NORM_RTOL = 0.02, 0.03
"""Rounding of bfloat16: nats a token, and share of the gradient's norm."""


def trainer(report: Report) -> None:
    _against_the_cpu(report)
    spec = model_spec("qwen3", "0.6B")
    engine = _engine(spec, device="cuda", dtype="bfloat16")
    step_s, _, peak = _steps(engine, _samples(LENGTHS), num=2)
    estimated = estimate_memory(
        engine.config, spec=spec, degrees=engine.config.parallelism.resolve_degrees(1), on_gpu=True
    ).total
    report.figure("peak of the estimate", peak / estimated)
    report.require(
        peak <= MARGIN * estimated,
        f"a step took {peak / 2**30:.2f} GiB, and its estimate is {estimated / 2**30:.2f} GiB: "
        "configs that are called fitting may not fit",
    )
    limits = measure_limits(dtype="bfloat16", num_bytes=1 << 30, device=torch.device("cuda"))
    attended = sum(n * (n + 1) / 2 for n in LENGTHS)
    flops = count_work(spec.model).count_training_flops(tokens=sum(LENGTHS), attended=attended)
    report.figure("tokens/s", sum(LENGTHS) / step_s)
    report.figure("products TFLOP/s", limits.flops_per_s / 1e12)
    report.figure("memory GB/s", limits.memory_bytes_per_s / 1e9)
    report.figure("MFU", flops / step_s / limits.flops_per_s, at_least=LEAST_MFU)


def compiled(report: Report) -> None:
    spec = _with_layers(model_spec("qwen3", "0.6B"), 8)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder, "model"), spec=spec, seed=0)
        for enable in (False, True):
            engine = _engine(spec, device="cuda", dtype="bfloat16", folder=model, compile=enable)
            _, first, _ = _steps(engine, _samples((300, 200, 77)), num=1)
            step_s, _, _ = _steps(engine, _samples(LENGTHS), num=2)
            found[enable] = step_s, first
    report.same("the compiled loss", abs(found[True][1] - found[False][1]), atol=LOSS_ATOL)
    report.figure("speed-up", found[False][0] / found[True][0], at_least=1.0)


def _against_the_cpu(report: Report) -> None:
    spec = _with_layers(model_spec("qwen3", "0.6B"), LAYERS_ON_CPU)
    samples, found = _samples(LENGTHS_ON_CPU), {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder, "model"), spec=spec, seed=0)
        for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
            engine = _engine(spec, device=device, dtype=dtype, folder=model)
            result = engine.forward_backward(samples)
            assert result.denominator is not None
            norm = engine.optim_step().grad_norm
            found[device, dtype] = result.loss_sum / result.denominator, norm
            del engine
    loss, norm = found["cpu", "float32"]
    for dtype, factor in (("float32", 0.01), ("bfloat16", 1.0)):
        of_gpu = found["cuda", dtype]
        report.same(f"the loss in {dtype}", abs(of_gpu[0] - loss), atol=LOSS_ATOL * factor)
        report.same(
            f"the gradient's norm in {dtype}", abs(of_gpu[1] / norm - 1), atol=NORM_RTOL * factor
        )


def _with_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    spec.model.num_layers = num_layers
    return spec


def _engine(
    spec: ModelSpec, *, device: str, dtype: Any, folder: Path | None = None, compile: bool = False
) -> TrainingEngine:
    """Return an engine that keeps float32 weights and computes in `dtype`."""
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    config = TrainingEngine.Config(
        loss=CrossEntropyLoss(),
        compile=CompileConfig(enable=compile),
        training=TrainingConfig(
            max_tokens_per_microbatch=min(
                MOST_TOKENS, max(LENGTHS[0], TOKENS_PER_GB * gpu_bytes // 10**9)
            ),
            logits_chunk_tokens=2048,
            dtype="float32",
            param_dtype=dtype,
        ),
    )
    assets = None if folder is None else str(folder)
    return TrainingEngine(config=config, model_spec=spec, hf_assets_path=assets, device=device)


def samples_of(sequences: Sequence[np.ndarray]) -> list[TrainingSample]:
    """Return samples in which every token except the first is a target."""
    return [
        TrainingSample(
            token_ids=token_ids,
            mask=np.arange(len(token_ids)) > 0,
            generator_logprobs=np.full(len(token_ids), np.nan, dtype=np.float32),
            advantages=np.zeros(len(token_ids), dtype=np.float32),
            policy_versions=np.full(len(token_ids), -1, dtype=np.int32),
        )
        for token_ids in sequences
    ]


def _samples(lengths: Sequence[int]) -> list[TrainingSample]:
    random = np.random.default_rng(0)
    return samples_of([random.integers(0, 1000, n, dtype=np.int32) for n in lengths])


def _steps(
    engine: TrainingEngine, samples: list[TrainingSample], *, num: int
) -> tuple[float, float, int]:
    """Return the shortest duration of `num` steps after one that warms up, the first loss and the
    peak memory.
    """
    times_s, losses, peak = [], [], 0
    for _ in range(num + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = engine.forward_backward(samples)
        peak = torch.cuda.max_memory_allocated()  # since the last optim_step began
        engine.optim_step()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started)
        assert result.denominator is not None
        losses.append(result.loss_sum / result.denominator)
    return min(times_s[1:]), losses[0], peak
