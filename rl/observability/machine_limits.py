"""Measured limits of a machine: matrix products and memory copies.

Each kind of machine is measured once, by the process and threads that compute there, and cached in a file. The
best of several tries counts, since other work only slows a try down. If the tries differ much the machine was
busy, and the result is used but not cached.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from rl.config.effect import only_if
from rl.models.batch_invariant.probe import processor
from rl.utils.files import atomic_write

MEASURE_S = 0.4
"""Duration of all tries of one rate."""
MATRICES = {"cpu": (512, 1024), "cuda": (8192,)}
"""Rows of the square matrices that are multiplied; the best rate counts."""
LARGEST_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
SMALLEST_COPY = 1 << 20
QUIET = 1.5
"""Ratio of the median try to the shortest one up to which a machine counts as quiet."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """Comparison of steps with the machine's measured limits."""

    enable: bool = True
    """Measure the machine once, and report the share of its limits that each part of a step reaches."""
    cache: str = field(default="~/.cache/relay", metadata=only_if("enable", True))
    """Folder of the measurements, for later runs on the same kind of machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload for which a machine is measured."""

    dtype: str
    """Dtype of the matrix products, such as "bfloat16"."""
    num_bytes: int
    """Bytes of a rank's weights, which are read again and again, perhaps from a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """Limits of one device, or of the CPU threads of one process."""

    device: str
    flops_per_s: float
    """Floating-point operations in products of large matrices."""
    memory_bytes_per_s: float
    """Bytes read and written in the device's memory."""
    host_bytes_per_s: float
    """Bytes copied between the device and the host's memory; on a CPU `memory_bytes_per_s`."""
    file: str = ""
    """Cache file, or empty."""


Measure = Callable[[Workload, torch.device], tuple[MachineLimits, bool]]


def machine_limits(
    workload: Workload, *, device: torch.device, cache: Path, measure: Measure | None = None
) -> MachineLimits:
    """Return the cached limits, or measure with the calling thread's number of threads.

    A cache folder that cannot be written is a warning. `measure` replaces `measured` in tests.
    """
    on_gpu = device.type == "cuda"
    subject = {  # all that a measurement depends on
        "device": _name(device),
        "cores": 0 if on_gpu else os.cpu_count() or 1,
        "threads": 0 if on_gpu else torch.get_num_threads(),
        "dtype": workload.dtype,
        "bytes": _copied_bytes(workload, device),
        "torch": torch.__version__,
    }
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:16]
    file = cache.expanduser() / f"machine-{name}.json"
    try:
        return MachineLimits(**json.loads(file.read_text())["limits"])
    except (OSError, ValueError, KeyError, TypeError):  # not measured, or damaged
        pass
    limits, is_quiet = (measure or measured)(workload, device)
    if not is_quiet:
        logger.info("%s was busy during the measurement, which is repeated next time", limits.device)
        return limits
    kept = dataclasses.replace(limits, file=str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as new:
            new.write_text(json.dumps({"of": subject, "limits": dataclasses.asdict(kept)}, indent=2) + "\n")
    except OSError as error:
        logger.warning("%s was not written, so the machine is measured again next time: %s", file, error)
        return limits
    return kept


@torch.no_grad()
def measured(workload: Workload, device: torch.device) -> tuple[MachineLimits, bool]:
    """Measure the limits; return them, and whether the machine was quiet."""
    on_gpu = device.type == "cuda"
    num_bytes = _copied_bytes(workload, device)
    multiplied = {
        size: _products(size, getattr(torch, workload.dtype), device) for size in MATRICES[device.type]
    }
    size = max(multiplied, key=lambda size: size**3 / min(multiplied[size]))
    source, target = torch.ones(2, num_bytes // 8, device=device)  # read and written together
    tries = [multiplied[size], _tries("target.copy_(source)", source=source, target=target)]
    memory = host = num_bytes / min(tries[-1])
    if on_gpu:
        source = torch.ones(LARGEST_COPY["cpu"] // 4, device=device)
        pinned = torch.empty(LARGEST_COPY["cpu"] // 4, pin_memory=True)
        tries.append(_tries("target.copy_(source)", source=source, target=pinned))
        host = LARGEST_COPY["cpu"] / min(tries[-1])
        del source, target
        torch.cuda.empty_cache()  # other work needs the memory
    limits = MachineLimits(
        device=_name(device),
        flops_per_s=2 * size**3 / min(multiplied[size]),
        memory_bytes_per_s=memory,
        host_bytes_per_s=host,
    )
    logger.info("measured: %s", limits)
    return limits, all(statistics.median(times) <= QUIET * min(times) for times in tries)


def _products(size: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Return the durations of products of square matrices."""
    # A separate generator leaves the run's random states unchanged.
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    return _tries("torch.mm(a, b, out=c)", a=a, b=a.t().contiguous(), c=torch.empty_like(a))


def _tries(statement: str, **names: Any) -> list[float]:
    """Return the durations of a statement, run again and again for `MEASURE_S`."""
    timer = Timer(statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=MEASURE_S).times)


def _copied_bytes(workload: Workload, device: torch.device) -> int:
    """Return a power of two, so that models of similar size share a measurement."""
    largest = LARGEST_COPY[device.type]
    return min(largest, max(SMALLEST_COPY, 2 ** math.ceil(math.log2(max(1, workload.num_bytes)))))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
