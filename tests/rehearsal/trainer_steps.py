"""Steps of a training engine on the null device; prints what they launched, waited for and held as
one line of JSON.

    python -m tests.rehearsal.trainer_steps bfloat16 float32 lack

Cases are the dtypes, `lack` (of memory) and `compiled`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import varlen

from losses.policy import GRPOLoss
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import Degrees
from rl.models import qwen3
from rl.models.decoder import FeedForward
from rl.models.spec import ModelSpec
from rl.trainer_types import DeviceMemory
from rl.training.config import TrainingConfig
from rl.training.device_memory import DeviceMemoryError, read_peak_memory, use_growing_segments
from rl.training.engine import TrainingEngine
from rl.training.memory import estimate_memory
from rl.training.sleep import TrainerSleep
from rl.types import TrainingSample
from tools.null_gpu.counters import Counters, read_own, reset_own

NUM_LAYERS = 2
LENGTHS = (610, 420, 390, 280, 170, 60)
MAX_TOKENS = 1500
"""Two micro-batches: the longest segments are longer than what the grids of a CPU compute at once.
"""


def model_spec() -> ModelSpec:
    spec = qwen3.model_registry("tiny")
    model = spec.adapter.sized(
        vocab_size=8192, dim=512, num_layers=NUM_LAYERS, num_heads=8, num_kv_heads=2, head_dim=64,
        feed_forward=FeedForward.Config(hidden_dim=1536), tie_embeddings=True, theta=1e4,
        max_positions=4096,
    )  # fmt: skip
    return replace(spec, model=model)


def make_samples(*, prompt: int, shorter: int = 0) -> list[TrainingSample]:
    """Return samples of two prompts, so that both whole sequences and shared prompts are packed."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 8192, (2, prompt))
    samples = []
    for index, length in enumerate(LENGTHS):
        ids = np.concatenate((prompts[min(index, 1)], rng.integers(0, 8192, length - shorter)))
        mask = np.arange(len(ids)) >= prompt
        ones = mask.astype(np.float32)
        logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
        versions = np.zeros(len(ids), np.int32)
        samples.append(
            TrainingSample(
                token_ids=ids,
                mask=mask,
                advantages=ones,
                generator_logprobs=logprobs,
                policy_versions=versions,
            )
        )
    return samples


def make_engine(dtype: Any, *, compiled: bool = False) -> TrainingEngine:
    config = TrainingEngine.Config(
        # The number of valid tokens is read back as 0, by which a step would divide.
        loss=GRPOLoss(normalization="none"),
        compile=CompileConfig(enable=compiled),
        training=TrainingConfig(param_dtype=dtype, max_tokens_per_microbatch=MAX_TOKENS),
    )
    return config.build(model_spec=model_spec(), hf_assets_path=None, device="cuda")


def counted(engine: TrainingEngine, samples: list[TrainingSample]) -> tuple[Counters, Any]:
    reset_own()
    result = engine.forward_backward(samples)
    # What the result has was read back from the device, as 0.
    assert result.memory is not None
    result = replace(result, memory=DeviceMemory.of_numbers(read_peak_memory(engine.device)))
    engine.optim_step()
    return read_own(), result


def of_dtype(dtype: str) -> dict[str, Any]:
    """Return the counts of a second step, and its memory."""
    engine = make_engine(dtype)
    counted(engine, make_samples(prompt=200))
    with mock.patch.object(varlen, "varlen_attn", wraps=varlen.varlen_attn) as attention:
        step, result = counted(engine, make_samples(prompt=210, shorter=3))
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=1)
    estimate = estimate_memory(engine.config, spec=engine.policy.spec, degrees=degrees, on_gpu=True)
    num_batches = result.packing.num_micro_batches
    held = torch.cuda.memory_reserved()
    sleep = TrainerSleep(engine)
    moved = sleep.sleep()
    asleep = torch.cuda.memory_reserved()
    sleep.wake()
    return {
        "attention": {
            part: step.num_kernels(part) / num_batches / NUM_LAYERS
            for part in (
                "flash_fwd",
                "flash_bwd_dq_dk_dv",
                "fmha_cutlassF_f32",
                "fmha_cutlassB_f32",
            )
        },
        "key_heads": sorted({call.args[1].size(1) for call in attention.call_args_list}),
        "fused_adamw": step.num_kernels("fused_adamw"),
        "waits": step.waits,
        "pageable_copies": {name: n for name, n in step.calls.items() if "pageable" in name},
        "num_batches": num_batches,
        "peak": result.memory.allocated,
        "reserved": result.memory.reserved,
        "total": result.memory.total,
        "estimate": estimate.total,
        "given_back": held - asleep,
        "moved": moved,
        "expandable": torch.cuda.memory_snapshot()[0]["is_expandable"],
    }


def of_lack() -> str:
    """Return the error of a step for which the GPU has too little memory."""
    engine = make_engine("bfloat16")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        engine.forward_backward(make_samples(prompt=200))
    except DeviceMemoryError as error:
        return str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return ""


def of_compiled() -> dict[str, Any]:
    """Return the counts of compiled steps over batches of ever new lengths, and the graphs made for
    them.
    """
    engine, eager = make_engine("bfloat16", compiled=True), make_engine("bfloat16")
    frames, launches = [], []
    for step in range(6):
        samples = make_samples(prompt=200 + 11 * step, shorter=7 * step)
        step_counts, result = counted(engine, samples)
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        launches.append(step_counts.launches)
    plain, _ = counted(eager, samples)
    return {
        "graphs": frames,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "launches": launches,
        "eager_launches": plain.launches,
        "flash": step_counts.num_kernels("flash_fwd")
        / result.packing.num_micro_batches
        / NUM_LAYERS,
        "shared": result.num_tokens > sum(b.loss_rows.numel() for b in engine.policy.pack(samples)),
    }


if __name__ == "__main__":
    use_growing_segments()
    assert "expandable_segments" in os.environ["PYTORCH_ALLOC_CONF"]
    cases = {"lack": of_lack, "compiled": of_compiled}
    print(
        json.dumps(
            {name: cases[name]() if name in cases else of_dtype(name) for name in sys.argv[1:]}
        )
    )
