"""What a machine can do at most, measured: products of matrices, and copies of memory.

It is measured once for a kind of machine, by the process and with the threads that compute there, and kept in
a file that says of what it is; the best of several tries counts, as whatever else runs only ever takes away.
Where the tries are far apart the machine was busy: what was measured then is used, and not kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rl.atomic_file import replacing
from rl.config.effect import only_if
from rl.models.batch_invariant.probe import processor

TRY_S = 0.05
"""What is timed takes about as long, once."""
MEASURE_S = 0.4
"""And is repeated for as long, of each of the rates."""
LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}
LARGEST_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
SMALLEST_COPY = 1 << 20
"""Bytes."""
QUIET = 1.5
"""How many times as long as the shortest try the median may take on a machine that does nothing else."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """What steps are compared with."""

    enable: bool = True
    """Measure what the machine can do, once, and report the share of it that each part of a step reaches."""
    cache: str = field(default="~/.cache/relay", metadata=only_if("enable", True))
    """Folder that keeps what was measured, for later runs on the same kind of machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a machine is measured for."""

    dtype: str
    """Of the products, such as "bfloat16"."""
    num_bytes: int
    """That are read again and again; a rank's weights. What fits a processor's cache is read faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """Of one device, or of the CPU threads of one process."""

    device: str
    flops_per_s: float
    """Operations of products of large matrices."""
    memory_bytes_per_s: float
    """Read and written together, in the device's own memory."""
    host_bytes_per_s: float
    """To the host's memory and back; of a CPU `memory_bytes_per_s`."""
    file: str = ""
    """That it is kept in; empty where it is not."""


Measure = Callable[[Workload, torch.device], tuple[MachineLimits, bool]]
"""As `measured`."""


def machine_limits(
    workload: Workload, *, device: torch.device, cache: Path, measure: Measure | None = None
) -> MachineLimits:
    """Kept from before, or measured now on the calling thread's number of threads.

    Args:
        cache: folder of the files; one that cannot be written is no error.
        measure: `measured`, if None.
    """
    subject = _subject(workload, device)
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:16]
    file = cache.expanduser() / f"machine-{name}.json"
    if (kept := _read(file, subject)) is not None:
        return kept
    limits, is_quiet = (measure or measured)(workload, device)
    if not is_quiet:
        logger.info("%s was busy while it was measured: it is measured again next time", limits.device)
        return limits
    limits = dataclasses.replace(limits, file=str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write_text(json.dumps({"of": subject, "limits": dataclasses.asdict(limits)}, indent=2) + "\n")
    except OSError as error:
        logger.warning("%s was not written, the machine is measured again next time: %s", file, error)
        return dataclasses.replace(limits, file="")
    return limits


def _subject(workload: Workload, device: torch.device) -> dict[str, str | int]:
    """All that a measurement depends on."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else processor(),
        "cores": 0 if on_gpu else os.cpu_count() or 1,
        "threads": 0 if on_gpu else torch.get_num_threads(),
        "dtype": workload.dtype,
        "bytes": _copied_bytes(workload, device),
        "torch": torch.__version__,
    }


def _read(file: Path, subject: dict[str, str | int]) -> MachineLimits | None:
    try:
        kept = json.loads(file.read_text())
        return MachineLimits(**kept["limits"]) if kept["of"] == subject else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tries:
    """Seconds that one and the same took, again and again."""

    seconds: tuple[float, ...]

    @property
    def best_s(self) -> float:
        return min(self.seconds)

    @property
    def are_quiet(self) -> bool:
        return statistics.median(self.seconds) <= QUIET * self.best_s


@torch.no_grad()
def measured(workload: Workload, device: torch.device) -> tuple[MachineLimits, bool]:
    """Now, and whether nothing else seems to have run."""
    started = time.perf_counter()
    on_gpu = device.type == "cuda"
    num_bytes = _copied_bytes(workload, device)
    copied = _copy(num_bytes, device, device)
    flops, multiplied = _multiply(getattr(torch, workload.dtype), device)
    all_tries = [copied, multiplied]
    memory = host = num_bytes / copied.best_s
    if on_gpu:
        all_tries.append(_copy(LARGEST_COPY["cpu"], device, torch.device("cpu")))
        host = LARGEST_COPY["cpu"] / all_tries[-1].best_s
        torch.cuda.empty_cache()  # what was measured with is needed by others now
    limits = MachineLimits(
        device=torch.cuda.get_device_name(device) if on_gpu else processor(),
        flops_per_s=flops / multiplied.best_s,
        memory_bytes_per_s=memory,
        host_bytes_per_s=host,
    )
    logger.info(
        "measured in %.1f s: %s does %.3g GFLOP/s in %s, %.3g GB/s in its memory, %.3g GB/s to the host's",
        time.perf_counter() - started,
        limits.device,
        limits.flops_per_s / 1e9,
        workload.dtype,
        limits.memory_bytes_per_s / 1e9,
        limits.host_bytes_per_s / 1e9,
    )
    return limits, all(tries.are_quiet for tries in all_tries)


def _multiply(dtype: torch.dtype, device: torch.device) -> tuple[int, _Tries]:
    """Square matrices, as large as can be multiplied in `TRY_S`; with the operations of one product."""
    size = 128
    while True:
        # Of its own: a run's random states stay as they are.
        generator = torch.Generator(device=device).manual_seed(0)
        a = torch.randn(size, size, device=device, generator=generator).to(dtype)
        b, result = a.t().contiguous(), torch.empty_like(a)
        flops = 2 * size**3
        multiply = partial(torch.mm, a, b, out=result)
        _timed(multiply, device, num=1)  # the first of a size chooses kernels
        takes_s = min(_timed(multiply, device, num=1) for _ in range(3))
        # The next size takes eight times as long.
        if size >= LARGEST_MATRIX[device.type] or 8 * takes_s > TRY_S:
            return flops, _tries(multiply, device)
        size *= 2


def _copy(num_bytes: int, device: torch.device, other: torch.device) -> _Tries:
    """So many bytes, read and written: from one half of a buffer to the other. Or all from a device to the
    host, read alone."""
    if device == other:
        source, target = torch.ones(2, num_bytes // 8, device=device)
    else:
        source = torch.ones(num_bytes // 4, device=device)
        target = torch.empty(num_bytes // 4, pin_memory=True)
    return _tries(partial(target.copy_, source), device)


def _copied_bytes(workload: Workload, device: torch.device) -> int:
    """A power of two, so that models of like sizes share a measurement."""
    largest = LARGEST_COPY[device.type]
    return min(largest, max(SMALLEST_COPY, 2 ** math.ceil(math.log2(max(1, workload.num_bytes)))))


def _tries(action: Callable[[], Tensor], device: torch.device) -> _Tries:
    """Seconds of one, as often as `MEASURE_S` lets it, each of several in a row that are long enough."""
    once_s = max(_timed(action, device, num=1), 1e-9)
    num = max(1, round(TRY_S / 4 / once_s))
    seconds: list[float] = []
    until = time.perf_counter() + MEASURE_S
    while not seconds or time.perf_counter() < until:
        seconds.append(_timed(action, device, num=num))
    return _Tries(seconds=tuple(seconds))


def _timed(action: Callable[[], Tensor], device: torch.device, *, num: int) -> float:
    """Seconds of one of so many."""
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(num):
        action()
    _wait_for(device)
    return (time.perf_counter() - started) / num


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
