"""Tensor parallelism whose communication overlaps its matrix products.

The compiler splits a gather or scatter beside a matrix product into pieces that are copied
while others are multiplied, through memory that GPUs share (symmetric memory, NVLink).
"""

from __future__ import annotations

import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.compile import CompileConfig


def check_async_tensor_parallel(
    *, tensor_parallel_degree: int, compile_config: CompileConfig, device_type: str
) -> None:
    """What can be known of it without touching a GPU.

    Raises:
        ValueError: names what is missing.
    """
    prefix = "parallelism.async_tensor_parallel=True"
    if device_type != "cuda":
        raise ValueError(
            f"{prefix} on device {device_type!r}: must be False: it copies through memory that GPUs share"
        )
    if tensor_parallel_degree == 1:
        raise ValueError(
            f"{prefix} with tensor_parallel_degree=1: must be False: there is nothing to overlap"
        )
    if not compile_config.includes("model") or compile_config.backend != "inductor":
        raise ValueError(
            f"{prefix} needs compile.enable=True, 'model' among compile.components and compile.backend="
            "'inductor': the compiler makes the overlap"
        )


def check_peer_access(*, device: torch.device, num_devices: int) -> None:
    """That this GPU reads the memory of the machine's other first `num_devices`.

    Raises:
        ValueError: names the pair.
    """
    present = torch.cuda.device_count()
    if present < num_devices:
        raise ValueError(
            f"parallelism.async_tensor_parallel=True: the ranks of tensor_parallel_degree={num_devices} must "
            f"be GPUs of one machine, and this one has {present}"
        )
    index = device.index or 0
    first = index - index % num_devices
    for other in range(first, first + num_devices):
        if other != index and not torch.cuda.can_device_access_peer(index, other):
            raise ValueError(
                f"parallelism.async_tensor_parallel=True: GPU {index} cannot read the memory of GPU {other}: "
                "must be False without NVLink between tensor-parallel ranks"
            )


def overlap_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let everything compiled from now on overlap the collectives of this mesh of one axis."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Newer PyTorch enables every group and says so.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
