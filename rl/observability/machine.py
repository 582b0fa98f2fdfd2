"""The limits of a run's machines, measured, and what holds up a step.

Metrics tell which share of its machine's limits each part of a step reached:

    limit/decode  least time of the decoding at the measured rates (operations or bytes, whichever
                  takes longer), as a share of the time it took
    limit/train   the same for the operations of forward_backward and optim_step
    limit/sync    the same for copying the weights in a push and a pull
    limit/idle    mean share of the step in which trainer and generators were idle; on shared
                  devices, in which both were

Only the work that a step needs at least is counted (docs/metrics.md). The limits are measured
before the first step, by the processes and threads that compute there. The best of several tries
counts, since other work only slows a try down.

The last lines of a run and its report name the largest part of a typical step, and the option that
would make it smaller.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rl.config.json import get_value_at
from rl.observability.metrics import Mean, Record, Sink, reduce_metric

if TYPE_CHECKING:
    # The report names the bottleneck too, and should not wait for the import of torch.
    import torch

    from rl.models.model_cost import ModelWork

MEASURE_S = 0.1
"""Duration of all tries of one rate."""
MATRICES = {"cpu": (512, 1024), "cuda": (8192,)}
"""Rows of the square matrices that are multiplied; the best rate counts."""
LARGEST_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
SMALLEST_COPY = 1 << 20


# Limits of the machine


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


def measure_limits(*, dtype: str, num_bytes: int, device: torch.device) -> MachineLimits:
    """Measure the limits with the calling thread's number of threads.

    Args:
        dtype: dtype of the matrix products, such as "bfloat16".
        num_bytes: bytes of a rank's weights, which are read again and again, perhaps from a cache.
    """
    import torch

    with torch.no_grad():
        flops_per_s = _measure_products(getattr(torch, dtype), device)

        num_bytes = min(LARGEST_COPY[device.type], max(SMALLEST_COPY, num_bytes))
        # A copy reads and writes: each half has half of the bytes.
        source, target = torch.ones(2, num_bytes // 8, device=device)
        memory = host = num_bytes / _measure_least_s(partial(target.copy_, source), device)
        if device.type == "cuda":
            num_bytes = LARGEST_COPY["cpu"]
            source = torch.ones(num_bytes // 4, device=device)
            pinned = torch.empty(num_bytes // 4, pin_memory=True)
            host = num_bytes / _measure_least_s(partial(pinned.copy_, source), device)
            del source, target
            # Otherwise PyTorch keeps the memory, which other work needs.
            torch.cuda.empty_cache()
    return MachineLimits(flops_per_s=flops_per_s, memory_bytes_per_s=memory, host_bytes_per_s=host)


def _measure_products(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the fastest matrix product."""
    import torch

    # A separate generator leaves the run's random states unchanged.
    generator = torch.Generator(device=device).manual_seed(0)
    flops_per_s = 0.0
    for rows in MATRICES[device.type]:
        a = torch.randn(rows, rows, device=device, generator=generator).to(dtype)
        b, product = a.t().contiguous(), torch.empty_like(a)
        multiply = partial(torch.mm, a, b, out=product)
        flops_per_s = max(flops_per_s, 2 * rows**3 / _measure_least_s(multiply, device))
    return flops_per_s


def _measure_least_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the shortest duration of an action that is repeated for `MEASURE_S`.

    At least three times, as the first one may load a library.
    """
    import torch

    times_s: list[float] = []
    while sum(times_s) < MEASURE_S or len(times_s) < 3:
        start_s = time.perf_counter()
        action()
        if device.type == "cuda":
            # Kernels run after the call that starts them has returned.
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


# Shares of the limits


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

    def compute_shares(self, record: Record) -> dict[str, float]:
        """Return the shares, up to 1, that a step's record has enough metrics for."""
        shares = {
            "limit/decode": self._compare_decode(record),
            "limit/train": self._compare_train(record),
            "limit/sync": self._compare_sync(record),
            "limit/idle": self._compute_idle(record),
        }
        # More than 1 means that the machine was busy while it was measured.
        return {name: min(1.0, share) for name, share in shares.items() if share is not None}

    def _compare_decode(self, record: Record) -> float | None:
        drawn, prompts = record.get("perf/generated_tokens_per_s"), record.get("prompt/tokens_mean")
        context = reduce_metric(record.get("completion/context_mean"))
        if not (isinstance(drawn, Mean) and drawn.sum > 0 and drawn.count > 0) or context is None:
            return None

        # Each step reads all weights once, for the tokens of all completions that are running.
        tokens, busy_s = drawn.sum / self.num_replicas, drawn.count
        steps = tokens / self.most_running
        if self.waits_for_the_longest:
            steps = max(steps, reduce_metric(record.get("completion/tokens_max")) or 0.0)

        prompt_tokens = prompts.sum if isinstance(prompts, Mean) else 0.0
        computed = tokens + prompt_tokens / self.num_samples / self.num_replicas
        attended = tokens * context
        flops = self.sampled.count_sampling_flops(tokens=computed, attended=attended)
        read = self.sampled.count_sampling_bytes(
            steps=steps, tokens=tokens, attended=attended, itemsize=self.itemsize
        )
        least_s = max(flops / self.generator.flops_per_s, read / self.generator.memory_bytes_per_s)
        return least_s * self.num_replicas / self.num_generator_ranks / busy_s

    def _compare_train(self, record: Record) -> float | None:
        context, train_s = (
            record.get("packing/context_mean"),
            reduce_metric(record.get("time/train_s")),
        )
        if not isinstance(context, Mean) or not context.count or not train_s:
            return None
        flops = self.trained.count_training_flops(tokens=context.count, attended=context.sum)
        return flops / self.trainer.flops_per_s / self.num_trainer_ranks / train_s

    def _compare_sync(self, record: Record) -> float | None:
        push_s, pull_s = (
            reduce_metric(record.get("time/push_s")),
            reduce_metric(record.get("time/pull_s")),
        )
        took_s = (push_s or 0.0) + (pull_s or 0.0)
        if not took_s:
            return None
        num_bytes = self.sampled.parameters * self.itemsize
        # The trainer copies to the host's memory once, each replica from there; a copy within the
        # host's memory reads and writes.
        on_host = self.trainer.host_bytes_per_s == self.trainer.memory_bytes_per_s
        copy_s = num_bytes * (2 if on_host else 1) / self.trainer.host_bytes_per_s
        copies = 1 / self.num_trainer_ranks + self.num_replicas / self.num_generator_ranks
        return copy_s * copies / took_s

    def _compute_idle(self, record: Record) -> float | None:
        step_s = reduce_metric(record.get("time/step_s"))
        idle_s: list[float] = []
        for role in ("trainer", "generator"):
            seconds = reduce_metric(record.get(f"time/{role}_idle_s"))
            if seconds is not None:
                idle_s.append(seconds)
        if not (idle_s and step_s):
            return None

        if self.shares_devices:
            # Each is busy only while the other is idle, so one of them always counts as idle.
            return max(0.0, sum(idle_s) / step_s - (len(idle_s) - 1))
        return sum(idle_s) / len(idle_s) / step_s


class LimitSink:
    """Sink that adds `limit/` (0 to 1) to the records of steps and hands all records on."""

    def __init__(self, *, limits: RunLimits, sinks: Sequence[Sink]) -> None:
        self._limits = limits
        self._sinks = sinks
        self._published: float | None = None
        """Version of the latest weight sync."""

    def write(self, record: Record) -> None:
        if "time/step_s" in record:
            shares = self._limits.compute_shares(record)
            version = reduce_metric(record.get("sync/version"))
            # A step without a sync has the metrics of the latest sync, of an earlier step.
            if version == self._published:
                shares.pop("limit/sync", None)
            self._published = version
            record = {**record, **shares}
        for sink in self._sinks:
            sink.write(record)


# The bottleneck


NUM_FIRST = 2
"""First steps of a run, which allocate and compile; ignored if there are enough others."""
OVERLAP = 0.2
"""Share of a step that generation and training must each take for an overlap to pay."""
LONGER = 2.0
"""How many times as long as generation training must take to keep all its threads beside it."""
NEAR = 0.5
"""Share of the machine's limit from which on more hardware is the advice."""
_LARGEST = 1e15
"""Bound on the numbers of a config, which may come from anybody."""

Config = Mapping[str, Any]
"""Values of a run's config.json."""
Advice = tuple[str, str]
"""Reason, and the option that would move the bottleneck."""

_PARTS = {
    "generate": ("generation", "limit/decode"),
    "score": ("scoring", None),
    "train": ("training", "limit/train"),
    "publish": ("the sync of the weights", "limit/sync"),
}
"""Parts of a step: name, and metric of the share of the limit. The time is in `time/<part>_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Part of a step that takes the most time.

    Example:
        >>> find_bottleneck({"time/step_s": 10.0, "time/score_s": 9.0})
        Bottleneck(sentence="Scoring takes 90% of a step: ...", setting="--reward.num_procs 2")
    """

    sentence: str
    setting: str
    """Command-line option that would move the bottleneck, with a value if one is known."""


def compute_typical_step(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each metric over the steps of a run, without its first steps."""
    steps = [record for record in records if "time/step_s" in record]
    if len(steps) > 2 * NUM_FIRST:
        steps = steps[NUM_FIRST:]

    values: dict[str, list[float]] = {}
    for record in steps:
        for name, value in record.items():
            # A metric of a step that diverged says nothing about a typical step.
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: statistics.median(of_name) for name, of_name in values.items()}


def find_bottleneck(record: Mapping[str, float], config: Config | None = None) -> Bottleneck | None:
    """Return the bottleneck of a step's record, or of `compute_typical_step`; None if the record
    has no times.

    Without the run's config the advice may be a setting that the run has.
    """
    config, step_s = config or {}, record.get("time/step_s", 0.0)
    shares: dict[str, float] = {}
    for part in _PARTS:
        if step_s > 0 and f"time/{part}_s" in record:
            shares[part] = record[f"time/{part}_s"] / step_s
    if not shares:
        return None

    generating = shares.get("generate", 0.0) + shares.get("score", 0.0)
    training = shares.get("train", 0.0) + shares.get("publish", 0.0)
    if _is_overlap_possible(record, config) and min(generating, training) >= OVERLAP:
        idle = record.get("limit/idle")
        waste = "" if idle is None else f", and devices are idle for {_format_percent(idle)} of it"
        fact = (
            f"generation ({_format_percent(generating)} of a step) and training "
            f"({_format_percent(training)}) take turns{waste}"
        )
        keeps_threads = training >= LONGER * generating
        because, setting = _choose_overlap_advice(config, trainer_keeps_threads=keeps_threads)
    else:
        part = max(shares, key=lambda name: shares[name])
        name, limit = _PARTS[part]
        reached = record.get(limit) if limit is not None else None
        fact = f"{name} takes {_format_percent(shares[part])} of a step"
        if reached is not None:
            fact += f" and reaches {_format_percent(reached)} of what the machine can do"
        is_near = reached is not None and reached >= NEAR
        because, setting = _choose_advice(part, record, config, is_near=is_near)
    return Bottleneck(sentence=f"{fact[0].upper()}{fact[1:]}: {because}", setting=setting)


def _is_overlap_possible(record: Mapping[str, float], config: Config) -> bool:
    """Return whether generation and training take turns on devices of their own."""
    steps = _get_number(config, "loop.max_off_policy_steps") or record.get("staleness/max", 0.0)
    return not steps and not get_value_at(config, "launch.share_gpus")


def _choose_overlap_advice(config: Config, *, trainer_keeps_threads: bool) -> Advice:
    """Advise to overlap generation and training. On one CPU each gets half the threads.

    With all threads twice, threads of small kernels wait for each other. A trainer that computes
    long after the generator is done keeps its threads: with half of them a step of SmolLM2-135M on
    two cores took 54 s, with all 39.
    """
    setting = "--loop.max_off_policy_steps 1"
    halves = ""
    for role in ("trainer", "generator"):
        num_threads = _get_number(config, f"{role}.num_threads")
        if num_threads >= 2 and not (role == "trainer" and trainer_keeps_threads):
            halves += f" --{role}.num_threads {num_threads // 2:.0f}"
    if _is_on_gpu(config) or not halves:
        return "at the same time, a step would take as long as the longer of the two", setting
    because = "at the same time, each with half its threads, they use the cores better"
    if trainer_keeps_threads:
        because = "at the same time, generation with half its threads, they use the cores better"
    return because, setting + halves


def _choose_advice(
    part: str, record: Mapping[str, float], config: Config, *, is_near: bool
) -> Advice:
    """Advise for the largest part of a step; `is_near` is true near the machine's limit."""
    if part == "score":
        because = "reward functions are slow; more processes score in parallel"
        return because, _format_double(config, "reward.num_procs")
    if part == "publish":
        if _is_overlap_possible(record, config):
            because = (
                "with generation one step ahead, weights are transferred during the next gradient"
            )
            return because, "--loop.max_off_policy_steps 1"
        return "more threads copy more at once", _format_double(config, "weights.num_threads")
    if part == "train":
        return _choose_train_advice(record, config, is_near=is_near)

    num_replicas = max(1.0, _get_number(config, "generator.num_replicas"))
    num_rollouts = _get_number(config, "loop.groups_per_batch")
    num_rollouts *= _get_number(config, "loop.group_size")
    requests = num_rollouts / num_replicas
    if not is_near and requests > _get_number(config, "generator.max_num_seqs") > 0:
        because = (
            f"a step has {requests:.0f} completions for each generator, and more at once "
            "cost little more"
        )
        return because, f"--generator.max_num_seqs {math.ceil(requests)}"
    because = "more completions at a time need more generators"
    return because, _format_double(config, "generator.num_replicas")


def _choose_train_advice(record: Mapping[str, float], config: Config, *, is_near: bool) -> Advice:
    if is_near:
        return "more of it needs more ranks", _format_double(config, "trainer.num_procs")
    if record.get("packing/num_micro_batches", 1.0) > 1:
        because = "fewer, larger micro-batches use the machine better, if they fit into memory"
        return because, _format_double(config, "trainer.training.max_tokens_per_microbatch")
    if _is_on_gpu(config) and get_value_at(config, "trainer.compile.enable") is False:
        return "compiled blocks do more in fewer kernels", "--trainer.compile.enable True"
    because = "its matrix products are small for the machine, and a larger batch uses it better"
    return because, "--loop.groups_per_batch"


def _format_double(config: Config, path: str) -> str:
    """Return the option with twice its value; without a value if the config has none."""
    value = _get_number(config, path)
    return f"--{path} {2 * value:.0f}" if value else f"--{path}"


def _get_number(config: Config, path: str) -> float:
    value = get_value_at(config, path)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else 0.0


def _is_on_gpu(config: Config) -> bool:
    """Return whether the generator has half precision, which only GPU runs use."""
    return get_value_at(config, "generator.dtype") in ("bfloat16", "float16")


def _format_percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%"
