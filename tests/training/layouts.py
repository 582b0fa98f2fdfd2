"""What each rank of a parallel layout does and measures, for the tests of layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import CommConfig
from rl.distributed.shards import local_tensor, whole_tensor
from rl.training.engine import TrainingEngine
from rl.training.errors import NonFiniteLossError
from rl.training.gradients import sum_partial_gradients
from rl.types import ForwardBackwardResult, OptimStepResult
from tests.training.parts import engine_config, make_engine, make_sample, make_samples, small_spec

LAYOUTS = {
    "one": (1, ParallelismConfig()),
    "fsdp2": (2, ParallelismConfig(data_parallel_shard_degree=2)),
    "tp2": (2, ParallelismConfig(tensor_parallel_degree=2)),
    "ddp2": (2, ParallelismConfig(data_parallel_replicate_degree=2)),
    "fsdp2_tp2": (4, ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)),
    "hsdp2x2": (4, ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2)),
    "ddp2_tp2": (4, ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=2)),
    "cp2": (2, ParallelismConfig(context_parallel_degree=2)),
    "cp2_tp2": (4, ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2)),
    "fsdp2_cp2": (4, ParallelismConfig(data_parallel_shard_degree=2, context_parallel_degree=2)),
    "hsdp2_cp2": (4, ParallelismConfig(data_parallel_replicate_degree=2, context_parallel_degree=2)),
}
"""Number of processes and degrees, by name."""

Tensors = dict[str, np.ndarray]


def half_tolerance(parallelism: ParallelismConfig) -> float:
    """By how much a gradient may differ, in norm, from one device's, both computed in bfloat16.

    Twice what was measured, which is what its rounding explains: 0.05 where tensor-parallel ranks round
    their parts of every sum before these are added, as much as one device's differ from those in float32;
    0.017 where micro-batches or pieces of them are other ones.
    """
    return 0.1 if parallelism.tensor_parallel_degree > 1 else 0.035


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """By one rank, in this order."""

    logprobs: list[np.ndarray]
    """Of all samples, before any step."""
    whole: ForwardBackwardResult
    """Of all samples in one call."""
    gradients: Tensors
    """After it, not yet divided."""
    parts: list[ForwardBackwardResult]
    """Of three calls on parts of the samples, from the same weights; each with the logprobs of its second and
    its first sample."""
    part_gradients: Tensors
    steps: list[OptimStepResult]
    """Of the parts, then of two more steps."""
    parameters: Tensors
    """After the steps; then a checkpoint and an export are written."""
    sparse: ForwardBackwardResult
    """Of a single sample: all data ranks but one have none."""
    not_finite: str
    """What a NaN advantage on one sample raised."""
    restored: OptimStepResult
    """A step from the checkpoint."""
    half: ForwardBackwardResult
    """Of all samples, computed in bfloat16 from the first weights."""
    half_gradient_dtypes: set[str]
    half_gradients: Tensors


def measure(layout: str, assets: str, folder: str) -> Measured:
    parallelism = LAYOUTS[layout][1]
    engine = make_engine(assets, parallelism=parallelism, failure_folder=f"{folder}/failures")
    samples = make_samples()
    logprobs = engine.compute_logprobs(samples)

    whole = engine.forward_backward(samples)
    gradients = whole_gradients(engine)
    engine.load_checkpoint(assets)
    parts = [
        engine.forward_backward(part, return_logprobs=[1, 0])
        for part in (samples[:2], samples[2:9], samples[9:])
    ]
    part_gradients = whole_gradients(engine)
    steps = [engine.optim_step()]
    for _ in range(2):
        engine.forward_backward(samples)
        steps.append(engine.optim_step())
    parameters = whole_parameters(engine)
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/exported")

    sparse = engine.forward_backward(samples[:1])
    not_finite = provoke_nan(engine)
    engine.load_checkpoint(f"{folder}/checkpoint")
    engine.forward_backward(samples)
    restored = engine.optim_step()

    half_engine = make_engine(assets, parallelism=parallelism, param_dtype="bfloat16")
    half = half_engine.forward_backward(samples, loss=CrossEntropyLoss())
    gradients_of_half = [p.grad for p in half_engine.policy.parameters.values() if p.grad is not None]
    dtypes = {str(local_tensor(gradient).dtype) for gradient in gradients_of_half}
    half_gradients = whole_gradients(half_engine)
    engine.close()
    return Measured(
        logprobs=logprobs,
        whole=whole,
        gradients=gradients,
        parts=parts,
        part_gradients=part_gradients,
        steps=steps,
        parameters=parameters,
        sparse=sparse,
        not_finite=not_finite,
        restored=restored,
        half=half,
        half_gradient_dtypes=dtypes,
        half_gradients=half_gradients,
    )


def provoke_nan(engine: TrainingEngine) -> str:
    broken = replace(make_sample(length=9, seed=0), advantages=np.full(9, np.nan, dtype=np.float32))
    try:
        engine.forward_backward([broken, *make_samples()[1:3]])
    except NonFiniteLossError as error:
        return f"{error.what} at policy version {error.policy_version}"
    return "nothing raised"


def restore(layout: str, assets: str, checkpoint: str) -> tuple[int, Tensors]:
    """Version and parameters of a checkpoint that another layout wrote."""
    engine = make_engine(assets, parallelism=LAYOUTS[layout][1])
    version = engine.load_checkpoint(checkpoint)
    parameters = whole_parameters(engine)
    engine.close()
    return version, parameters


def one_step(parallelism: ParallelismConfig, assets: str) -> tuple[ForwardBackwardResult, OptimStepResult]:
    engine = make_engine(assets, parallelism=parallelism)
    engine.compute_logprobs(make_samples()[:3])  # leaves FSDP between two forwards
    result = engine.forward_backward(make_samples()), engine.optim_step()
    engine.close()
    return result


def first_rank_alone(assets: str) -> str:
    """Rank 0 trains; the others have nothing to say. What rank 0 gets to know."""
    config = engine_config(parallelism=ParallelismConfig())
    config.comm = CommConfig(init_timeout_s=60.0, train_timeout_s=1.0)
    engine = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    if engine.policy.data_rank.index > 0:
        return ""
    try:
        engine.forward_backward(make_samples())
    except RuntimeError as error:
        return "\n".join([str(error), *error.__notes__])
    return "nothing raised"


def refuse_layout(assets: str) -> str:
    """More tensor-parallel ranks than key-value heads."""
    try:
        make_engine(assets, parallelism=ParallelismConfig(tensor_parallel_degree=3))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def whole_gradients(engine: TrainingEngine) -> Tensors:
    """Accumulated so far, on every rank."""
    sum_partial_gradients(list(engine.policy.parameters.values()))
    return {name: to_numpy(p.grad) for name, p in engine.policy.parameters.items() if p.grad is not None}


def whole_parameters(engine: TrainingEngine) -> Tensors:
    return {name: to_numpy(p) for name, p in engine.policy.parameters.items()}


def to_numpy(tensor: Tensor) -> np.ndarray:
    return whole_tensor(tensor.detach()).numpy().copy()
