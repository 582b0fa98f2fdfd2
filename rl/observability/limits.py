"""Metrics `limit/`: the share of the machine's measured limits that each part of a step reached.

    limit/decode    least time of the decoding at the measured rates (operations or bytes, whichever takes
                    longer), as a share of the time it took
    limit/train     the same for the operations of forward_backward and optim_step
    limit/sync      the same for copying the weights in a push and a pull
    limit/idle      mean share of the step in which trainer and generators were idle; on shared devices, in
                    which both were

Only the work that a step needs at least is counted (docs/troubleshooting.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl.models.model_cost import ModelWork
from rl.observability.machine_limits import MachineLimits
from rl.observability.metrics import Mean, Record, reduced

TOO_MUCH = 1.05
"""Share above which the machine must have been busy when it was measured."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Sink of `rl.loop.loop`."""

    def write(self, record: Record) -> None: ...


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
        """Return the shares that a step's record has enough metrics for; a share may exceed 1."""
        shares = {
            "limit/decode": self._decode(record),
            "limit/train": self._train(record),
            "limit/sync": self._sync(record),
            "limit/idle": _idle(record, shares_devices=self.shares_devices),
        }
        return {name: share for name, share in shares.items() if share is not None}

    def _decode(self, record: Record) -> float | None:
        drawn, context = record.get("perf/generated_tokens_per_s"), _value(record, "completion/context_mean")
        if not (isinstance(drawn, Mean) and drawn.sum > 0 and drawn.count > 0) or context is None:
            return None
        tokens, busy_s = drawn.sum / self.num_replicas, drawn.count
        steps = tokens / self.most_running
        if self.waits_for_the_longest:
            steps = max(steps, _value(record, "completion/tokens_max") or 0.0)
        prompt_tokens = _sum(record, "prompt/tokens_mean") / self.num_samples / self.num_replicas
        attended = tokens * context
        flops = self.sampled.sampling_flops(tokens=tokens + prompt_tokens, attended=attended)
        read = self.sampled.sampling_bytes(
            steps=steps, tokens=tokens, attended=attended, itemsize=self.itemsize
        )
        least_s = max(flops / self.generator.flops_per_s, read / self.generator.memory_bytes_per_s)
        return least_s * self.num_replicas / self.num_generator_ranks / busy_s

    def _train(self, record: Record) -> float | None:
        context, train_s = record.get("packing/context_mean"), _value(record, "time/train_s")
        if not isinstance(context, Mean) or not context.count or not train_s:
            return None
        flops = self.trained.training_flops(tokens=context.count, attended=context.sum)
        return flops / self.trainer.flops_per_s / self.num_trainer_ranks / train_s

    def _sync(self, record: Record) -> float | None:
        times_s = [_value(record, f"time/{name}_s") for name in ("push", "pull")]
        took_s = sum(time_s for time_s in times_s if time_s is not None)
        if not took_s:
            return None
        num_bytes = self.sampled.parameters * self.itemsize
        # The trainer copies to the host's memory once, each replica from there; a copy within the host's memory
        # reads and writes.
        on_host = self.trainer.host_bytes_per_s == self.trainer.memory_bytes_per_s
        copy_s = num_bytes * (2 if on_host else 1) / self.trainer.host_bytes_per_s
        return copy_s * (1 / self.num_trainer_ranks + self.num_replicas / self.num_generator_ranks) / took_s


class LimitSink:
    """Sink that adds `limit/` (0 to 1) to the records of steps and hands all records on."""

    def __init__(self, *, limits: RunLimits, sinks: Sequence[Sink]) -> None:
        self._limits = limits
        self._sinks = sinks
        self._published: float | None = None
        """Version of the latest weight sync."""
        self._warned: set[str] = set()

    def write(self, record: Record) -> None:
        if "time/step_s" in record:
            record = {**record, **self._shares(record)}
        for sink in self._sinks:
            sink.write(record)

    def _shares(self, record: Record) -> dict[str, float]:
        shares = self._limits.of_step(record)
        version = _value(record, "sync/version")
        if version == self._published:
            shares.pop("limit/sync", None)  # the sync of an earlier step
        self._published = version
        for name, share in shares.items():
            if share > TOO_MUCH and name not in self._warned:
                self._warned.add(name)
                machine = self._limits.generator if name == "limit/decode" else self._limits.trainer
                logger.warning(
                    "%s is %.2f, above the measured limit of %s, which was busy during the measurement; "
                    "remove %s to measure again",
                    name, share, machine.device, machine.file,
                )  # fmt: skip
        return {name: min(1.0, share) for name, share in shares.items()}


def _idle(record: Record, *, shares_devices: bool) -> float | None:
    step_s = _value(record, "time/step_s")
    idle_s = [_value(record, f"time/{role}_idle_s") for role in ("trainer", "generator")]
    known = [seconds for seconds in idle_s if seconds is not None]
    if not (known and step_s):
        return None
    if shares_devices:  # each is busy only while the other is not
        return max(0.0, sum(known) / step_s - (len(known) - 1))
    return sum(known) / len(known) / step_s


def _value(record: Mapping[str, object], name: str) -> float | None:
    return reduced(record.get(name))  # type: ignore[arg-type]


def _sum(record: Record, name: str) -> float:
    metric = record.get(name)
    return metric.sum if isinstance(metric, Mean) else 0.0
