"""What is checked of a layout and its options before a process starts."""

from __future__ import annotations

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.async_tensor_parallel import check_async_tensor_parallel
from rl.distributed.compile import CompileConfig, check_compiler
from rl.distributed.mesh import Degrees, ParallelismConfig


def check_layout(
    *,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    world_size: int,
    device_type: str,
) -> Degrees:
    """Degrees of a trainer of `world_size` processes on devices of that type.

    Raises:
        ValueError: names the field, its value and what is valid.
    """
    degrees = parallelism.degrees(world_size)
    activation_checkpoint.__post_init__()  # A field may have been edited since.
    if parallelism.async_tensor_parallel:
        check_async_tensor_parallel(
            tensor_parallel_degree=degrees.tp, compile_config=compile, device_type=device_type
        )
    check_compiler(compile, device_type=device_type)
    return degrees


def check_selective_option(config: ActivationCheckpointConfig, *, num_layers: int) -> None:
    """Raise ValueError for every n-th block of a model that has fewer."""
    option = config.selective_option
    if option != "op" and int(option) > num_layers:
        raise ValueError(
            f"activation_checkpoint.selective_option={option!r}: must be 'op', or a number of layers up to "
            f"{str(num_layers)!r}, which the model has: more checkpoint the first block alone, as that does"
        )
