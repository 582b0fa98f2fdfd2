"""What each rank of a parallel layout does and measures with a mixture of experts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.gloo import use_one_worker
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.shards import local_tensor
from rl.models.buffers import persistent_buffers
from rl.models.hf import write_hf_folder
from rl.models.qwen3.model import Attention, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3_moe.model import MoE
from rl.models.qwen3_moe.registry import model_registry
from rl.models.spec import ModelSpec
from rl.models.tokenizer import build_byte_tokenizer
from rl.training.engine import TrainingEngine
from rl.training.experts import ExpertBalance
from rl.types import ForwardBackwardResult, OptimStepResult
from tests.training.layouts import Tensors, to_numpy, whole_gradients, whole_parameters
from tests.training.parts import VOCAB, engine_config, make_samples

LAYOUTS = {
    "one": (1, ParallelismConfig()),
    "fsdp2": (2, ParallelismConfig(data_parallel_shard_degree=2)),
    "ddp2": (2, ParallelismConfig(data_parallel_replicate_degree=2)),
    "ep2": (2, ParallelismConfig(data_parallel_shard_degree=2, expert_parallel_degree=2)),
    "tp2": (2, ParallelismConfig(tensor_parallel_degree=2)),
    "etp2": (2, ParallelismConfig(tensor_parallel_degree=2, expert_tensor_parallel_degree=2)),
    "fsdp2_ep2": (4, ParallelismConfig(data_parallel_shard_degree=4, expert_parallel_degree=2)),
    "hsdp2_ep2": (
        4,
        ParallelismConfig(
            data_parallel_replicate_degree=2, data_parallel_shard_degree=2, expert_parallel_degree=2
        ),
    ),
    "ep2_tp2": (
        4,
        ParallelismConfig(data_parallel_shard_degree=2, expert_parallel_degree=2, tensor_parallel_degree=2),
    ),
    "ep2_etp2": (
        4,
        ParallelismConfig(
            data_parallel_shard_degree=2,
            expert_parallel_degree=2,
            tensor_parallel_degree=2,
            expert_tensor_parallel_degree=2,
        ),
    ),
    "fsdp2_etp2": (
        4,
        ParallelismConfig(
            data_parallel_shard_degree=2, tensor_parallel_degree=2, expert_tensor_parallel_degree=2
        ),
    ),
    "fsdp2_tp2": (4, ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)),
    "ddp2_tp2": (4, ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=2)),
    "cp2_tp2": (4, ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2)),
    "hsdp2x2": (4, ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2)),
    "fsdp2_cp2": (4, ParallelismConfig(data_parallel_shard_degree=2, context_parallel_degree=2)),
    "ddp2_cp2": (4, ParallelismConfig(data_parallel_replicate_degree=2, context_parallel_degree=2)),
    "cp2_ep2_etp2": (
        4,
        ParallelismConfig(
            context_parallel_degree=2,
            expert_parallel_degree=2,
            tensor_parallel_degree=2,
            expert_tensor_parallel_degree=2,
        ),
    ),
}
"""Number of processes and degrees, by name."""
SLOW = ("fsdp2_tp2", "ddp2_tp2", "cp2_tp2", "hsdp2x2", "fsdp2_cp2", "ddp2_cp2", "cp2_ep2_etp2")

BIAS_RATE = 0.01


def moe_spec(*, tie: bool = True) -> ModelSpec:
    """Two layers of width 36, six experts of width 20: sizes that shards do not all divide evenly."""
    model = Qwen3.Config(
        vocab_size=VOCAB,
        dim=36,
        num_layers=2,
        tie_embeddings=tie,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, head_dim=6),
            feed_forward=MoE.Config(num_experts=6, num_experts_per_token=2, hidden_dim=20),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=64),
    )
    return replace(model_registry("tiny"), model=model)


def write_moe_assets(folder: Path, *, tie: bool = True) -> str:
    """Weights larger than usual, uneven norms and uneven bias, so that every one of them matters."""
    spec = moe_spec(tie=tie)
    model = spec.model.build()
    model.init_weights(seed=3, std=0.2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
            if name.endswith("load_balance_bias"):
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    with tempfile.TemporaryDirectory() as tokenizer:
        build_byte_tokenizer(tokenizer)
        tensors = model.state_dict().items()
        adapter = spec.adapter(spec.model)
        write_hf_folder(folder, tensors, adapter, dtype=torch.float32, tokenizer_from=tokenizer)
    return str(folder)


def make_moe_engine(assets: str | None, parallelism: ParallelismConfig, **training: object) -> TrainingEngine:
    config = engine_config(parallelism=parallelism, **training)
    config.experts = ExpertBalance.Config(load_balance_rate=BIAS_RATE)
    return config.build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """By one rank, in this order."""

    logprobs: list[np.ndarray]
    """Of all samples, before any step."""
    whole: ForwardBackwardResult
    """Of all samples in one call."""
    gradients: Tensors
    """After it, not yet divided."""
    num_local: dict[str, int]
    """Elements of each parameter that this rank keeps."""
    part_gradients: Tensors
    """Of three calls on parts of the samples, from the same weights."""
    steps: list[OptimStepResult]
    """Of the parts, then of two more steps."""
    parameters: Tensors
    """After the steps; then a checkpoint and an export are written."""
    buffers: Tensors
    sparse: ForwardBackwardResult
    """Of a single sample: all data ranks but one have none."""
    restored: OptimStepResult
    """A step from the checkpoint."""
    restored_buffers: Tensors
    """As the checkpoint has them."""
    half: ForwardBackwardResult
    """Of all samples, computed in bfloat16 from the first weights."""
    half_gradient_dtypes: set[str]


def measure_layouts(layouts: list[str], assets: str, folder: str) -> dict[str, Measured]:
    """One after another in the same processes."""
    use_one_worker()
    dist.init_process_group("gloo")
    return {layout: measure(layout, assets, f"{folder}/{layout}") for layout in layouts}


def measure(layout: str, assets: str, folder: str) -> Measured:
    parallelism = LAYOUTS[layout][1]
    engine = make_moe_engine(assets, parallelism)
    samples = make_samples()
    logprobs = engine.compute_logprobs(samples)

    whole = engine.forward_backward(samples)
    gradients = whole_gradients(engine)
    num_local = {name: local_tensor(p).numel() for name, p in engine.policy.parameters.items()}
    engine.load_checkpoint(assets)
    for part in (samples[:2], samples[2:9], samples[9:]):
        engine.forward_backward(part)
    part_gradients = whole_gradients(engine)
    steps = [engine.optim_step()]
    for _ in range(2):
        engine.forward_backward(samples)
        steps.append(engine.optim_step())
    parameters, buffers = whole_parameters(engine), whole_buffers(engine)
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/exported")

    sparse = engine.forward_backward(samples[:1])
    engine.optim_step()
    engine.load_checkpoint(f"{folder}/checkpoint")
    restored_buffers = whole_buffers(engine)
    engine.forward_backward(samples)
    restored = engine.optim_step()

    half_engine = make_moe_engine(assets, parallelism, param_dtype="bfloat16")
    half = half_engine.forward_backward(samples, loss=CrossEntropyLoss())
    gradients_of_half = [p.grad for p in half_engine.policy.parameters.values() if p.grad is not None]
    engine.close()
    return Measured(
        logprobs=logprobs,
        whole=whole,
        gradients=gradients,
        num_local=num_local,
        part_gradients=part_gradients,
        steps=steps,
        parameters=parameters,
        buffers=buffers,
        sparse=sparse,
        restored=restored,
        restored_buffers=restored_buffers,
        half=half,
        half_gradient_dtypes={str(local_tensor(gradient).dtype) for gradient in gradients_of_half},
    )


def whole_buffers(engine: TrainingEngine) -> Tensors:
    buffers = persistent_buffers(engine.policy.model)
    assert not any(isinstance(buffer, DTensor) for buffer in buffers.values())
    return {name: to_numpy(buffer) for name, buffer in buffers.items()}


def restore_layouts(layouts: list[str], assets: str, checkpoint: str) -> list[tuple[int, Tensors]]:
    """Version, parameters and buffers of a checkpoint that another layout wrote, in each of these."""
    if layouts != ["one"]:
        use_one_worker()
        dist.init_process_group("gloo")
    restored = []
    for layout in layouts:
        engine = make_moe_engine(assets, LAYOUTS[layout][1])
        version = engine.load_checkpoint(checkpoint)
        restored.append((version, whole_parameters(engine) | whole_buffers(engine)))
    return restored
