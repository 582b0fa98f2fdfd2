"""Limits of a machine, and the share of them that each part of a step reached.

    limit/decode    least time of the decoding at the measured rates (operations or bytes, whichever takes
                    longer), as a share of the time it took
    limit/train     the same for the operations of forward_backward and optim_step
    limit/sync      the same for copying the weights in a push and a pull
    limit/idle      mean share of the step in which trainer and generators were idle; on shared devices, in
                    which both were

Only the work that a step needs at least is counted (docs/metrics.md).

Each kind of machine is measured once, by the process and threads that compute there, and the result is cached in a
file. The best of several tries counts, since other work only slows a try down; if most tries are slow, all may be,
and the result is not cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rl.config.effect import only_if
from rl.models.batch_invariant.probe import processor
from rl.models.model_cost import ModelWork
from rl.observability.metrics import Mean, Record, Sink, reduced
from rl.utils.errors import optional_write
from rl.utils.files import atomic_write

MEASURE_S = 0.4
"""Duration of all tries of one rate."""
BUSY = 1.5
"""Ratio of the median to the shortest try above which other work is taken to disturb a measurement."""
MATRICES = {"cpu": (512, 1024), "cuda": (8192,)}
"""Rows of the square matrices that are multiplied; the best rate counts."""
LARGEST_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
SMALLEST_COPY = 1 << 20

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


def machine_limits(workload: Workload, *, device: torch.device, cache: Path) -> MachineLimits:
    """Return the cached limits, or measure with the calling thread's number of threads.

    A cache folder that cannot be written is a warning.
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
    with suppress(OSError, ValueError, KeyError, TypeError):  # not measured, or damaged
        return MachineLimits(**json.loads(file.read_text())["limits"])
    limits, is_busy = measured(workload, device)
    if is_busy:
        logger.info("the measurement is not kept for later runs: the machine is busy")
        return limits
    with optional_write(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as new:
            new.write_text(json.dumps({"of": subject, "limits": asdict(limits)}, indent=2) + "\n")
    return limits


@torch.no_grad()
def measured(workload: Workload, device: torch.device) -> tuple[MachineLimits, bool]:
    """Measure the limits, and return whether other work disturbed that."""
    num_bytes = _copied_bytes(workload, device)
    products = {rows: _product_times_s(rows, workload.dtype, device) for rows in MATRICES[device.type]}
    flops_per_s = max(2 * rows**3 / min(times_s) for rows, times_s in products.items())
    source, target = torch.ones(2, num_bytes // 8, device=device)  # read and written together
    copies = to_host = _times_s("target.copy_(source)", source=source, target=target)
    memory = host = num_bytes / min(copies)
    if device.type == "cuda":
        num_bytes = LARGEST_COPY["cpu"]
        source = torch.ones(num_bytes // 4, device=device)
        pinned = torch.empty(num_bytes // 4, pin_memory=True)
        to_host = _times_s("target.copy_(source)", source=source, target=pinned)
        host = num_bytes / min(to_host)
        del source, target
        torch.cuda.empty_cache()  # other work needs the memory
    limits = MachineLimits(
        device=_name(device), flops_per_s=flops_per_s, memory_bytes_per_s=memory, host_bytes_per_s=host
    )
    logger.info("measured: %s", limits)
    return limits, any(median(each) > BUSY * min(each) for each in (*products.values(), copies, to_host))


def _product_times_s(rows: int, dtype: str, device: torch.device) -> list[float]:
    """Return durations of a product of square matrices."""
    # A separate generator leaves the run's random states unchanged.
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(rows, rows, device=device, generator=generator).to(getattr(torch, dtype))
    return _times_s("torch.mm(a, b, out=c)", a=a, b=a.t().contiguous(), c=torch.empty_like(a))


def _times_s(statement: str, **names: Any) -> list[float]:
    """Return the durations of a statement that is run again and again for `MEASURE_S`."""
    from torch.utils.benchmark import Timer  # slow to import, and most runs read a cached measurement

    timer = Timer(statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MEASURE_S).times


def _copied_bytes(workload: Workload, device: torch.device) -> int:
    """Return a power of two, so that models of similar size share a measurement."""
    largest = LARGEST_COPY[device.type]
    return min(largest, max(SMALLEST_COPY, 2 ** math.ceil(math.log2(max(1, workload.num_bytes)))))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


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
        """Return the shares that a step's record has enough metrics for.

        A share is at most 1: more means that the machine was busy while it was measured.
        """
        shares = {
            "limit/decode": self._decode(record),
            "limit/train": self._train(record),
            "limit/sync": self._sync(record),
            "limit/idle": self._idle(record),
        }
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
        # The trainer copies to the host's memory once, each replica from there; a copy within the host's memory
        # reads and writes.
        on_host = self.trainer.host_bytes_per_s == self.trainer.memory_bytes_per_s
        copy_s = num_bytes * (2 if on_host else 1) / self.trainer.host_bytes_per_s
        return copy_s * (1 / self.num_trainer_ranks + self.num_replicas / self.num_generator_ranks) / took_s

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
