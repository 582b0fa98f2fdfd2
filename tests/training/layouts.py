"""What each rank of a parallel layout does and measures, for `test_layouts.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.shards import whole_tensor
from rl.training.engine import TrainingEngine
from rl.training.errors import NonFiniteLossError
from rl.training.gradients import sum_partial_gradients
from rl.types import ForwardBackwardResult, OptimStepResult
from tests.training.parts import make_engine, make_sample, make_samples

LAYOUTS = {
    "one": (1, ParallelismConfig()),
    "fsdp2": (2, ParallelismConfig(data_parallel_shard_degree=2)),
    "tp2": (2, ParallelismConfig(tensor_parallel_degree=2)),
    "ddp2": (2, ParallelismConfig(data_parallel_replicate_degree=2)),
    "fsdp2_tp2": (4, ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """By one rank."""

    whole: ForwardBackwardResult
    """Of all samples in one call."""
    gradients: dict[str, np.ndarray]
    """After it, whole and not yet divided."""
    parts: list[ForwardBackwardResult]
    """Of three calls on parts of the samples, from the same weights."""
    part_gradients: dict[str, np.ndarray]
    steps: list[OptimStepResult]
    """Of the parts, then of two more steps."""
    logprobs: list[np.ndarray]
    """Of all samples, before any step."""
    parameters: dict[str, np.ndarray]
    """After the steps."""
    sparse: ForwardBackwardResult
    """Of a single sample: all other data ranks had none."""
    not_finite: str
    """What a NaN advantage on one sample raised."""
    after_checkpoint: OptimStepResult
    """A step from the checkpoint of the last state."""


def measure(layout: str, assets: str, folder: str) -> Measured:
    engine = make_engine(assets, parallelism=LAYOUTS[layout][1], failure_folder=f"{folder}/failures")
    samples = make_samples()
    logprobs = engine.compute_logprobs(samples)

    whole = engine.forward_backward(samples)
    gradients = whole_gradients(engine)
    engine.load_checkpoint(assets)
    parts = [engine.forward_backward(part) for part in (samples[:2], samples[2:9], samples[9:])]
    part_gradients = whole_gradients(engine)
    steps = [engine.optim_step()]
    for _ in range(2):
        engine.forward_backward(samples)
        steps.append(engine.optim_step())
    parameters = {name: to_numpy(p) for name, p in engine.policy.parameters.items()}

    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/exported")
    sparse = engine.forward_backward(samples[:1])
    broken = replace(make_sample(length=9, seed=0), advantages=np.full(9, np.nan, dtype=np.float32))
    try:
        engine.forward_backward([broken, *samples[1:3]])
        not_finite = "nothing raised"
    except NonFiniteLossError as error:
        not_finite = str(error)
    engine.load_checkpoint(f"{folder}/checkpoint")
    engine.forward_backward(samples)
    after_checkpoint = engine.optim_step()
    engine.close()
    return Measured(
        whole=whole,
        gradients=gradients,
        parts=parts,
        part_gradients=part_gradients,
        steps=steps,
        logprobs=logprobs,
        parameters=parameters,
        sparse=sparse,
        not_finite=not_finite,
        after_checkpoint=after_checkpoint,
    )


def whole_gradients(engine: TrainingEngine) -> dict[str, np.ndarray]:
    """Accumulated so far, whole, on every rank."""
    sum_partial_gradients(list(engine.policy.parameters.values()))
    return {name: to_numpy(p.grad) for name, p in engine.policy.parameters.items() if p.grad is not None}


def to_numpy(tensor: Tensor) -> np.ndarray:
    return whole_tensor(tensor.detach()).numpy().copy()
