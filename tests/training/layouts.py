"""Measurements of one rank of parallel layouts, for the tests of layouts.

A layout is named by its degrees, the schedule of its pipeline and the exchange of context
parallelism: `fsdp2_tp2`, `fsdp4_ep2`, `pp2_zbv`, `pp2_csv`, `cp2_alltoall`. All layouts of one
number of ranks share their processes.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from losses.correction import ImportanceCorrection
from losses.cross_entropy import CrossEntropyLoss
from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.sharding import gather_whole, local_tensor
from rl.models.decoder import find_persistent_buffers
from rl.models.float8 import Float8, Float8GroupedMM
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.training.config import ExpertBalanceConfig
from rl.training.engine import TrainingEngine
from rl.training.failures import NonFiniteLossError
from rl.training.gradients import place_gradients
from rl.training.merge import measure_merge
from tests.training.parts import (
    BIAS_RATE,
    RANK,
    built,
    engine_config,
    even_moe_spec,
    even_spec,
    granite_spec,
    make_sample,
    make_samples,
    moe_spec,
    windowed_spec,
    with_targets,
)

DEGREES = {
    "fsdp": "data_parallel_shard", "ddp": "data_parallel_replicate", "cp": "context_parallel",
    "tp": "tensor_parallel", "ep": "expert_parallel", "etp": "expert_tensor_parallel",
    "pp": "pipeline_parallel",
}  # fmt: skip
SCHEDULES = {"gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
SCHEDULE_CSV = Path(__file__).with_name("pipeline.csv")
"""Two stages from the last rank to the first, three micro-batches, backwards whole and in two
parts.
"""
REDUCED = ("fsdp2", "ddp2")
"""Layouts whose gradients are measured in both dtypes of the reduction."""
FOUR_STAGES = ("embed_tokens", "layers.0", "layers.1", "norm")

Tensors = dict[str, np.ndarray]
Assets = dict[str, str]
"""Folders of weights by kind of model, and of the adapters that LoRA starts with."""
Case = tuple[str, str]
"""Kind of model (dense, moe, lora, lora_moe) and layout."""
WITH_ADAPTERS = ("lora", "lora_moe")
"""Kinds whose adapters are saved and opened again."""


def sizes(layout: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d)", layout)}


def parallelism(layout: str) -> ParallelismConfig:
    degrees: dict[str, Any] = {
        f"{DEGREES[axis]}_degree": size for axis, size in sizes(layout).items()
    }
    for schedule in SCHEDULES.keys() & set(layout.split("_")):
        degrees["pipeline_parallel_schedule"] = SCHEDULES[schedule]
        if schedule != "gpipe":
            degrees["module_fqns_per_model_part"] = FOUR_STAGES
    if "csv" in layout:
        degrees["pipeline_parallel_schedule_csv"] = str(SCHEDULE_CSV)
    if "alltoall" in layout.split("_"):
        degrees["context_parallel_rotation"] = "alltoall"
    return ParallelismConfig(**degrees)


def num_ranks(layout: str) -> int:
    return math.prod(size for axis, size in sizes(layout).items() if axis not in ("ep", "etp"))


def spec_of(kind: str) -> ModelSpec:
    if kind in ("moe", "tied_moe", "lora_moe"):
        return moe_spec(tie=kind == "tied_moe")
    if kind == "dense":
        return windowed_spec(bias=True)
    if "float8" in kind:  # It multiplies only sizes that 16 divides.
        return even_moe_spec() if "moe" in kind else even_spec()
    return granite_spec()


def config_of(kind: str, layout: str, assets: Assets, **training: Any) -> TrainingEngine.Config:
    config = engine_config(parallelism=parallelism(layout), **training)
    if kind in ("moe", "tied_moe"):
        if config.parallelism.module_fqns_per_model_part is not None:
            config.parallelism.module_fqns_per_model_part = (*FOUR_STAGES[:-1], "norm,lm_head")
        config.experts = ExpertBalanceConfig(load_balance_rate=BIAS_RATE)
    if "float8" in kind:
        # Scales by row do not depend on how context parallelism splits a tensor.
        config.converters = (Float8.Config(emulate=True, recipe="rowwise"),)
    if kind == "float8_moe":
        config.converters = (*config.converters, Float8GroupedMM.Config(emulate=True))
    if "lora" in kind:
        lora = LoRA.Config(
            rank=RANK,
            alpha=2.0 * RANK,
            unembedding=kind in WITH_ADAPTERS,
            initial_adapter=assets[f"adapter of {kind}"],
        )
        config.converters = (*config.converters, lora)
    return config


def make(
    kind: str, layout: str, assets: Assets, *, failure_folder: str | None = None, **training: Any
) -> TrainingEngine:
    config = config_of(kind, layout, assets, **training)
    return built(config, assets.get(kind), spec=spec_of(kind), failure_folder=failure_folder)


def join(layout: str) -> None:
    """Create the process group that the engines of several layouts share."""
    # A loss that changed such an output in place would lose FSDP's hooks.
    warnings.filterwarnings("error", message=".*returned a view tensor")
    if num_ranks(layout) > 1:
        use_one_gloo_worker()
        dist.init_process_group("gloo")


def measure_all(cases: list[Case], assets: Assets, folder: str) -> dict[Case, dict[str, Any]]:
    join(cases[0][1])
    return {case: measure(case, assets, f"{folder}/{'_'.join(case)}") for case in cases}


def measure(case: Case, assets: Assets, folder: str) -> dict[str, Any]:
    """Return what one rank finds, by name, in the order of measurement."""
    kind, layout = case
    engine = make(kind, layout, assets, failure_folder=f"{folder}/failures")
    samples = make_samples()
    found: dict[str, Any] = {"logprobs": engine.compute_logprobs(samples)}
    found["merge lost"] = measure_merge_of(engine)
    found["whole"] = engine.forward_backward(samples)
    found["gradients"] = whole_gradients(engine)
    found["num_local"] = {
        name: local_tensor(p).numel() for name, p in engine.policy.parameters.items()
    }
    engine.load_checkpoint(assets[kind])
    found["parts"] = [
        engine.forward_backward(part, return_logprobs=[1, 0])
        for part in (samples[:2], samples[2:9], samples[9:])
    ]
    found["part gradients"] = whole_gradients(engine)
    found["norms"] = [engine.optim_step().grad_norm]
    for _ in range(2):
        engine.forward_backward(samples)
        found["norms"].append(engine.optim_step().grad_norm)
    found["weights"], found["state"] = whole_weights(engine), whole_state(engine)
    found["merged"] = whole(engine, engine.model_state_dict())
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/exported")
    if kind in WITH_ADAPTERS:
        trained = engine.compute_logprobs(samples)
        engine.save_adapter(f"{folder}/adapter")
        of_kind = assets | {f"adapter of {kind}": f"{folder}/adapter"}
        reopened = make(kind, layout, of_kind).compute_logprobs(samples)
        found["reopened"] = list(zip(reopened, trained, strict=True))

    found["sparse"] = engine.forward_backward(samples[:1])
    found["not finite"] = provoke_nan(engine)
    found["faulty loss"] = provoke_error(engine)
    found["continued"] = []
    for _ in range(2):
        engine.load_checkpoint(f"{folder}/checkpoint")
        found["restored"] = whole_state(engine)
        found["continued"].append(
            (engine.forward_backward(samples).loss_sum, engine.optim_step().grad_norm)
        )
    engine.close()

    if kind == "dense" and "pp" not in sizes(layout):
        found["early"] = step_in_backward(layout, assets)
    if kind in ("dense", "lora"):
        found["muon"] = step_with_muon(case, assets)
    if kind == "dense":
        found["losses"] = measure_losses(layout, assets)
        if layout in REDUCED:
            found["reduced"] = {
                dtype: reduced(layout, assets, dtype) for dtype in ("float32", "bfloat16")
            }
    return found


def measure_merge_of(engine: TrainingEngine) -> float | None:
    """Return what generators in bfloat16 lose of the adapters that an engine starts with."""
    return measure_merge(engine.policy, state_dict=engine.model_state_dict(), dtype=torch.bfloat16)


def measure_gradients(layouts: tuple[str, ...], assets: Assets) -> dict[str, dict[str, Any]]:
    """Return logprobs, result and gradients of one rank, by layout of a dense model."""
    join(layouts[0])
    samples, found = make_samples(), {}
    for layout in layouts:
        # Several passes of a schedule with three micro-batches.
        engine = make("dense", layout, assets, max_tokens_per_microbatch=20)
        found[layout] = {
            "logprobs": engine.compute_logprobs(samples),
            "whole": engine.forward_backward(samples),
            "gradients": whole_gradients(engine),
        }
        engine.close()
    return found


LOSS = GRPOLoss(
    kl_coef=0.3,
    entropy_coef=0.3,
    normalization="sequence_mean",
    correction=ImportanceCorrection(level="sequence", mode="mask", low=1e-4, high=1e4),
)
"""Loss that needs the reference policy, the entropy's gradient, whole sequences and their number.
"""


def measure_losses(
    layout: str, assets: Assets
) -> tuple[dict[str, float], Tensors, list[np.ndarray]]:
    """Return the sum and metrics of `LOSS` after one step, its gradients, and logprobs: those under
    the reference policy, and those of three targets of each token.
    """
    config = config_of("dense", layout, assets)
    config.loss, config.reference.enable = LOSS, True
    engine = built(config, assets["dense"], spec=spec_of("dense"))
    samples = make_samples()
    assert engine.forward_backward(samples).loss_metrics["kl"] == 0.0
    engine.optim_step()
    result = engine.forward_backward(samples)
    numbers = {"loss": result.loss_sum, "denominator": result.denominator, **result.loss_metrics}
    gradients, reference = whole_gradients(engine), engine.compute_reference_logprobs(samples)
    engine.drop_gradient()
    targets = [with_targets(sample, k=3, seed=i) for i, sample in enumerate(samples)]
    several = engine.forward(
        targets, loss=CrossEntropyLoss(weights="advantages", normalization="none")
    )
    assert several.logprobs is not None
    return numbers | {"of targets": several.loss_sum}, gradients, [*reference, *several.logprobs]


def step_with_muon(case: Case, assets: Assets) -> tuple[Tensors, Tensors]:
    """Return the weights after two steps with Muon, and their changes."""
    config = config_of(*case, assets)
    config.optimizer.name = "Muon"
    # Products in bfloat16 would turn rounding of a sum's last bits into differences of 2^-9.
    config.optimizer.muon.compute_dtype = "float32"
    engine = built(config, assets[case[0]], spec=spec_of(case[0]))
    start = whole_weights(engine)
    for _ in range(2):
        engine.forward_backward(make_samples())
        engine.optim_step()
    weights = whole_weights(engine)
    return weights, {name: tensor - start[name] for name, tensor in weights.items()}


def step_in_backward(layout: str, assets: Assets) -> tuple[Tensors, list[float]]:
    """Return the weights and norms of two steps in the backward."""
    config = config_of("dense", layout, assets, max_norm=math.inf)
    config.loss, config.optimizer.early_step_in_backward = (
        GRPOLoss(normalization="none"),
        layout != "one",
    )
    engine, norms = built(config, assets["dense"], spec=spec_of("dense")), []
    for _ in range(2):
        engine.forward_backward(make_samples())
        norms.append(engine.optim_step().grad_norm)
    return whole_weights(engine), norms


def reduced(layout: str, assets: Assets, dtype: str) -> Tensors:
    """Return this rank's gradients of one micro-batch, summed in `dtype`: more are added up in
    float32.
    """
    engine = make("dense", layout, assets, reduce_dtype=dtype, max_tokens_per_microbatch=400)
    engine.forward_backward(make_samples())
    gradients = {name: p.grad for name, p in engine.policy.parameters.items()}
    return {name: local_tensor(g).numpy() for name, g in gradients.items() if g is not None}


def provoke_nan(engine: TrainingEngine) -> str:
    broken = replace(make_sample(length=9, seed=0), advantages=np.full(9, np.nan, dtype=np.float32))
    try:
        engine.forward_backward([broken, *make_samples()[1:3]])
    except NonFiniteLossError as error:
        return f"{error.what} at policy version {error.policy_version}"
    return "nothing raised"


@dataclass(kw_only=True, slots=True)
class FaultyLoss(GRPOLoss):
    def __call__(self, inputs: LossInputs) -> LossOutput:
        raise ValueError("this loss is faulty")


def provoke_error(engine: TrainingEngine) -> str:
    """Return the error of a loss that only the last stage of a pipeline computes."""
    try:
        engine.forward_backward(make_samples(), loss=FaultyLoss())
    except ValueError as error:
        return str(error)
    return "nothing raised"


def restore_all(cases: list[Case], assets: Assets, folder: str) -> dict[Case, tuple[int, Tensors]]:
    """Return version and state of the checkpoint that one device wrote, in other layouts."""
    join(cases[0][1])
    return {case: restore(case, assets, f"{folder}/{case[0]}_one/checkpoint") for case in cases}


def restore(case: Case, assets: Assets, checkpoint: str) -> tuple[int, Tensors]:
    engine = make(*case, assets)
    return engine.load_checkpoint(checkpoint), whole_state(engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that must not change a number."""

    param_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint: str = "none"
    """none, full, op, or every n-th layer."""
    compiled: bool = False
    backend: Literal["inductor", "aot_eager"] = "aot_eager"
    cpu_offload: bool = False
    loss_parallel: bool = True
    chunk: int | None = None
    reshard: Literal["default", "always", "never"] = "default"

    def apply(self, config: TrainingEngine.Config) -> None:
        config.parallelism = replace(
            config.parallelism, loss_parallel=self.loss_parallel, reshard_after_forward=self.reshard
        )
        config.training = replace(
            config.training,
            param_dtype=self.param_dtype,
            cpu_offload=self.cpu_offload,
            logits_chunk_tokens=self.chunk,
        )
        mode = self.checkpoint if self.checkpoint in ("none", "full") else "selective"
        config.activation_checkpoint = ActivationCheckpointConfig(mode=mode)  # type: ignore[arg-type]
        if mode == "selective":
            config.activation_checkpoint.selective_option = self.checkpoint
        if self.compiled:
            config.compile = CompileConfig(enable=True, backend=self.backend)


def measure_options(cases: list[tuple[str, str, Options]], assets: Assets) -> list[dict[str, Any]]:
    join(cases[0][1])
    return [_measure_options(*case, assets) for case in cases]


def _measure_options(kind: str, layout: str, options: Options, assets: Assets) -> dict[str, Any]:
    counters = torch._dynamo.utils.counters
    counters.clear()  # Do not count graphs of earlier cases.
    if options.compiled:
        torch._dynamo.reset()
    config = config_of(kind, layout, assets)
    options.apply(config)
    samples = make_samples()
    if "float8" in kind:
        config.training.max_tokens_per_microbatch = 20
        samples = float8_samples()
    engine = built(config, assets.get(kind), spec=spec_of(kind))
    counted: list[int] = []
    embedding = engine.policy.model.get_submodule("embed_tokens")
    handle = embedding.register_forward_pre_hook(
        lambda _, inputs: counted.append(inputs[0].numel())
    )
    result = engine.forward_backward(samples)
    handle.remove()
    gradients = whole_gradients(engine)
    engine.optim_step()
    engine.close()
    return {
        "result": result,
        "gradients": gradients,
        "num_tokens": sum(counted),
        "num_graphs": counters["stats"]["unique_graphs"],
        # The attention of a CPU is not compiled: every batch, with other lengths, would be compiled
        # anew.
        "num_graph_breaks": sum(
            count
            for why, count in counters["graph_break"].items()
            if "AttentionBySegment" not in why
        ),
    }


def float8_samples() -> list[Any]:
    """Return samples that each fill a micro-batch, so that tensors that share a scale are the same
    in every layout."""
    return [make_sample(length=12 + i % 8, seed=200 + i) for i in range(6)]


def whole_gradients(engine: TrainingEngine) -> Tensors:
    """Return the accumulated gradients, unsharded, on every rank."""
    place_gradients(list(engine.policy.parameters.values()))
    return whole(
        engine, {name: p.grad for name, p in engine.policy.parameters.items() if p.grad is not None}
    )


def whole_parameters(engine: TrainingEngine) -> Tensors:
    return whole(engine, engine.policy.parameters)


def whole_weights(engine: TrainingEngine) -> Tensors:
    """Return parameters and persistent buffers, unsharded, on every rank."""
    return whole(engine, engine.policy.parameters | find_persistent_buffers(engine.policy.model))


def whole_state(engine: TrainingEngine) -> Tensors:
    """Return all that a checkpoint holds, unsharded, on every rank."""
    return whole(engine, engine.checkpointer.tensors())


def whole(engine: TrainingEngine, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors of all stages of a pipeline, unsharded, in the order of one device."""
    found = {
        name: tensor.numpy().copy()
        for name, tensor in engine.policy.gather_tensors(
            (n, t.detach()) for n, t in tensors.items()
        )
    }
    if engine.policy.pipeline is None:
        return found
    model = engine.policy.whole
    places = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]

    def place(name: str) -> tuple[str, int]:
        if name in places:
            return "", places.index(name)
        part, _, rest = name.partition(".")
        return part, places.index(rest if part != "optimizer" else rest.rpartition(".")[0])

    return dict(sorted(found.items(), key=lambda item: place(item[0])))


def to_numpy(tensor: Tensor) -> np.ndarray:
    return gather_whole(tensor.detach()).numpy().copy()
