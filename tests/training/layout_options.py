"""What each rank measures of a layout under options that must not change its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.training.engine import TrainingEngine
from rl.types import ForwardBackwardResult
from tests.training.layouts import LAYOUTS, Tensors, whole_gradients
from tests.training.parts import engine_config, make_samples, small_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint: str = "none"
    """none, full, op, or a number of layers."""
    compiled: bool = False
    backend: Literal["inductor", "aot_eager"] = "aot_eager"
    cpu_offload: bool = False
    loss_parallel: bool = True
    chunk: int | None = None
    reshard: Literal["default", "always", "never"] = "default"

    def config(self, layout: str) -> TrainingEngine.Config:
        parallelism = replace(
            LAYOUTS[layout][1],
            loss_parallel=self.loss_parallel,
            reshard_after_forward=self.reshard,
        )
        config = engine_config(
            parallelism=parallelism,
            param_dtype=self.param_dtype,
            cpu_offload=self.cpu_offload,
            logits_chunk_tokens=self.chunk,
        )
        config.activation_checkpoint = {
            "none": ActivationCheckpointConfig(),
            "full": ActivationCheckpointConfig(mode="full"),
        }.get(self.checkpoint) or ActivationCheckpointConfig(
            mode="selective", selective_option=self.checkpoint
        )
        if self.compiled:
            config.compile = CompileConfig(enable=True, backend=self.backend)
        return config


EAGER = (
    Options(checkpoint="none", cpu_offload=True, loss_parallel=False, chunk=7, reshard="never"),
    Options(checkpoint="full", cpu_offload=True, loss_parallel=True, chunk=None, reshard="always"),
    Options(param_dtype="bfloat16", checkpoint="full", cpu_offload=False, chunk=7, reshard="default"),
    Options(checkpoint="op", cpu_offload=True, loss_parallel=False, chunk=None, reshard="default"),
    Options(checkpoint="2", cpu_offload=True, loss_parallel=True, chunk=7, reshard="never"),
    Options(param_dtype="bfloat16", checkpoint="op", cpu_offload=True, chunk=None, reshard="never"),
    Options(checkpoint="none", cpu_offload=False, loss_parallel=True, chunk=None, reshard="always"),
    Options(checkpoint="full", cpu_offload=False, loss_parallel=False, chunk=7, reshard="default"),
    Options(param_dtype="bfloat16", checkpoint="2", cpu_offload=False, loss_parallel=False, reshard="always"),
    Options(checkpoint="op", cpu_offload=False, loss_parallel=True, chunk=7, reshard="never"),
    Options(checkpoint="2", cpu_offload=False, loss_parallel=False, chunk=None, reshard="always"),
    Options(param_dtype="bfloat16", checkpoint="none", cpu_offload=True, chunk=7, reshard="always"),
    Options(checkpoint="none", cpu_offload=False, loss_parallel=True, chunk=7, reshard="default"),
    Options(checkpoint="full", cpu_offload=False, loss_parallel=True, chunk=None, reshard="never"),
    Options(checkpoint="op", cpu_offload=False, loss_parallel=True, chunk=7, reshard="always"),
    Options(checkpoint="2", cpu_offload=True, loss_parallel=True, chunk=None, reshard="default"),
)
"""Run in every layout."""


def compiled(layout: str) -> Options:
    """Compiling takes long: one of the above for each layout, another one each time."""
    return replace(EAGER[list(LAYOUTS).index(layout) % len(EAGER)], compiled=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredOptions:
    result: ForwardBackwardResult
    gradients: Tensors
    num_tokens: int
    """That went through this rank's embedding."""
    num_graphs: int
    num_graph_breaks: int


def measure_options(layout: str, assets: str, rows: Sequence[Options]) -> list[MeasuredOptions]:
    engines = []
    measured = []
    for row in rows:
        torch._dynamo.utils.counters.clear()  # what was compiled in this process before is not this row's
        if row.compiled:
            torch._dynamo.reset()
        engine = row.config(layout).build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
        engines.append(engine)
        measured.append(_measure(engine))
    for engine in engines:
        engine.close()  # one of them made the process group that the later ones joined
    return measured


def _measure(engine: TrainingEngine) -> MeasuredOptions:
    counted: list[int] = []
    embedding = engine.policy.model.get_submodule("embed_tokens")
    handle = embedding.register_forward_pre_hook(lambda _, inputs: counted.append(inputs[0].numel()))
    result = engine.forward_backward(make_samples())
    handle.remove()
    counters = torch._dynamo.utils.counters
    return MeasuredOptions(
        result=dataclasses.replace(result, time_s=0.0),
        gradients=whole_gradients(engine),
        num_tokens=sum(counted),
        num_graphs=counters["stats"]["unique_graphs"],
        num_graph_breaks=sum(counters["graph_break"].values()),
    )
