"""What each rank measures of a mixture under an option, for `test_moe_options.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.models.converters.converter import ModelConverter
from rl.models.converters.lora import LoRA
from rl.training.engine import TrainingEngine
from rl.types import ExpertLoad
from tests.training.layouts import Tensors, whole_gradients
from tests.training.moe_layouts import LAYOUTS, moe_spec
from tests.training.parts import engine_config, make_samples

OPTIONS = (
    "none", "full", "selective_op", "selective_2", "offload", "reshard_never", "reshard_always", "lora"
)  # fmt: skip
CONTEXT = {
    "cp2": (2, ParallelismConfig(context_parallel_degree=2)),
    "cp2_ep2": (2, ParallelismConfig(context_parallel_degree=2, expert_parallel_degree=2)),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    loss_sum: float
    expert_load: ExpertLoad | None
    gradients: Tensors
    """Of one call, not yet divided."""


def measure_options(cases: list[tuple[str, str]], assets: str) -> list[Measured]:
    """Of (layout, option), one after another in the same processes."""
    if cases[0][0] != "one":
        dist.init_process_group("gloo")
    return [_measure(layout, option, assets) for layout, option in cases]


def _measure(layout: str, option: str, assets: str) -> Measured:
    engine = _config(layout, option).build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")
    result = engine.forward_backward(make_samples())
    gradients = whole_gradients(engine)
    engine.optim_step()
    engine.close()
    return Measured(loss_sum=result.loss_sum, expert_load=result.expert_load, gradients=gradients)


def _config(layout: str, option: str) -> TrainingEngine.Config:
    parallelism = (LAYOUTS | CONTEXT)[layout][1]
    config = engine_config(parallelism=parallelism, cpu_offload=option == "offload")
    if option.startswith("reshard"):
        config.parallelism = replace(parallelism, reshard_after_forward=option.removeprefix("reshard_"))  # type: ignore[arg-type]
    if option == "full":
        config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    elif option.startswith("selective"):
        how = option.removeprefix("selective_")
        config.activation_checkpoint = ActivationCheckpointConfig(mode="selective", selective_option=how)
    elif option == "compile":
        config.compile = CompileConfig(enable=True, backend="aot_eager")
    elif option == "lora":
        config.converters = _adapters()
    return config


def _adapters() -> tuple[ModelConverter.Config, ...]:
    return (LoRA.Config(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),)
