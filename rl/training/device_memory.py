"""A GPU's memory in training: the allocator's settings, peaks, and the error when it is full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.training.config import TrainingConfig
from rl.training.memory import MemoryEstimate
from rl.utils.errors import RunError


def use_growing_segments() -> None:
    """Let this process's allocator extend its blocks on a GPU.

    Packed batches have ever new sizes, each of which would need a block of its own. Page-locked
    host memory is not rounded up to a power of two: a sleeping trainer holds all its tensors there.
    Call it before the first use of the GPU; settings that the environment has stay.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = (
            "expandable_segments:True,pinned_max_round_threshold_mb:1"
        )
        # To share such memory between processes PyTorch 2.13 asserts that the driver tells of an
        # NVLink fabric, which it does not before Hopper (PyTorch's issue 186374). The trainer
        # shares none.
        os.environ.setdefault("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")


def read_peak_memory(device: torch.device) -> list[float]:
    """Return the fields of a rank's `DeviceMemory` since `reset_peak_memory`; empty for a CPU."""
    if device.type != "cuda":
        return []
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return [*peaks, torch.cuda.get_device_properties(device).total_memory]


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class DeviceMemoryError(RunError):
    """A GPU had no memory left for a call of the training engine."""


@contextmanager
def explain_memory_errors(
    what: str,
    *,
    device: torch.device,
    training: TrainingConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    estimated: Callable[[], MemoryEstimate],
) -> Iterator[None]:
    """Raise PyTorch's out-of-memory error with what was used, and what needs less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = _describe_usage(device)
        raise DeviceMemoryError(
            f"{what}: a rank of the trainer ran out of GPU memory.{used} The estimate was "
            f"{estimated().describe()}. "
            f"{_describe_savings(training, checkpoint_mode=activation_checkpoint.mode)}"
        ) from error


def _describe_usage(device: torch.device) -> str:
    """Return a sentence about the memory of a GPU, or nothing for a CPU."""
    peaks = read_peak_memory(device)
    if not peaks:
        return ""
    allocated, reserved, total = peaks
    free = torch.cuda.mem_get_info(device)[0]
    # Neither free nor PyTorch's: contexts, communicators, and whoever shares the GPU.
    others = total - free - torch.cuda.memory_reserved(device)
    return (
        f" PyTorch had taken {reserved / 1e9:.3g} GB of the GPU's {total / 1e9:.3g} GB at the "
        f"peak, {allocated / 1e9:.3g} GB of them for tensors; now {free / 1e9:.3g} GB are free, "
        f"and {others / 1e9:.3g} GB belong to CUDA, NCCL and other processes."
    )


def _describe_savings(training: TrainingConfig, *, checkpoint_mode: str) -> str:
    """Return the options that reduce memory and are not used yet, the cheapest first."""
    advice = [f"lower training.max_tokens_per_microbatch={training.max_tokens_per_microbatch}"]
    if checkpoint_mode != "full":
        advice.append(f"set activation_checkpoint.mode={checkpoint_mode!r} to 'full'")
    if not training.logits_chunk_tokens:
        advice.append("set training.logits_chunk_tokens to 2048")
    advice.append("raise parallelism.data_parallel_shard_degree or tensor_parallel_degree")
    if not training.cpu_offload:
        advice.append("set training.cpu_offload")
    return f"To need less: {', '.join(advice)}."
