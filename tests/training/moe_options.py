"""What each rank measures of a mixture under an option, for `test_moe_options.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.gloo import use_one_worker
from rl.distributed.mesh import ParallelismConfig
from rl.models.converters.converter import ModelConverter
from rl.models.converters.lora import LoRA
from rl.training.engine import TrainingEngine
from rl.types import ExpertLoad
from tests.training.layouts import Tensors, whole_gradients
from tests.training.moe_layouts import LAYOUTS, moe_spec
from tests.training.parts import engine_config, make_samples

OPTIONS = (
    "none", "full", "selective_op", "selective_2", "offload", "reshard_never", "reshard_always", "lora",
    "bfloat16", "bfloat16_full", "bfloat16_selective_op",
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
        use_one_worker()
        dist.init_process_group("gloo")
    return [_measure(layout, option, assets) for layout, option in cases]


def _measure(layout: str, option: str, assets: str) -> Measured:
    engine = _config(layout, option).build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")
    result = engine.forward_backward(make_samples())
    gradients = whole_gradients(engine)
    engine.optim_step()
    engine.close()
    return Measured(loss_sum=result.loss_sum, expert_load=result.expert_load, gradients=gradients)


class _Exchanges(TorchDispatchMode):
    """Counts all-to-alls that take place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "alltoall" in str(func).replace("_", "")
        return func(*args, **(kwargs or {}))


def count_exchanges(layout: str, options: list[str], assets: str) -> list[int]:
    """Of one `forward_backward` of two micro-batches, under each option."""
    use_one_worker()
    dist.init_process_group("gloo")
    counts = []
    for option in options:
        engine = _config(layout, option).build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")
        samples = make_samples()
        assert len(engine.policy.pack(samples)) == 2
        with _Exchanges() as exchanges:
            engine.forward_backward(samples)
        counts.append(exchanges.count)
    return counts


def _config(layout: str, option: str) -> TrainingEngine.Config:
    parallelism = (LAYOUTS | CONTEXT)[layout][1]
    dtype, option = ("bfloat16", option[9:]) if option.startswith("bfloat16") else ("float32", option)
    config = engine_config(parallelism=parallelism, param_dtype=dtype, cpu_offload=option == "offload")
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
    return (LoRA.Config(rank=4),)
