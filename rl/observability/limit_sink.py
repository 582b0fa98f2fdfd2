"""The share of the machine's limits that each part of a step reached, added to the step's record.

    limit/decode    of the time in which completions were drawn, what the draws would have taken at the rates
                    that were measured: by operations or by bytes, whichever is more
    limit/train     of the time of forward_backward and optim_step, what their operations would have taken
    limit/sync      of a push and a pull of the weights, what copying the bytes would have taken
    limit/idle      share of the step in which trainer and generators had nothing to do, their mean;
                    of devices that they share, in which neither had

What is counted is what the step needs at least, whatever is computed beside it (docs/timeline.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rl.machine_limits import MachineLimits
from rl.observability.metrics import Mean, Record, reduced
from rl.training.model_work import ModelWork

TOO_MUCH = 1.05
"""A share above this means that the machine was busy when it was measured."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """As `rl.loop.Sink`."""

    def write(self, record: Record) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """What is known of a run before its first step."""

    trainer: MachineLimits
    """Of one rank."""
    num_trainer_ranks: float
    """That compute at the same time; fewer than there are, where they share cores."""
    generator: MachineLimits
    """Of one tensor-parallel rank."""
    num_generator_ranks: float
    """Of all replicas together, that compute at the same time."""
    num_replicas: int
    shares_devices: bool
    """Whether trainer and generators take turns on the same devices."""
    trained: ModelWork
    sampled: ModelWork
    itemsize: int
    """Bytes of a number in the generators."""
    num_samples: int
    """Completions of a prompt: the prompt is read once for all."""
    most_running: int
    """Completions that one replica can draw at once."""
    waits_for_the_longest: bool
    """Whether a step's completions end before the next step's begin."""

    def of_step(self, record: Record) -> dict[str, float]:
        """Those shares that the record of a step says enough of; one may be above 1."""
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
        told = _sum(record, "prompt/tokens_mean") / self.num_samples / self.num_replicas
        attended = tokens * context
        flops = self.sampled.sampling_flops(tokens=tokens + told, attended=attended)
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
        # To the host's memory once, and from there by every replica, each rank its part; within it, a byte is
        # read and written.
        on_host = self.trainer.host_bytes_per_s == self.trainer.memory_bytes_per_s
        copy_s = num_bytes * (2 if on_host else 1) / self.trainer.host_bytes_per_s
        return copy_s * (1 / self.num_trainer_ranks + self.num_replicas / self.num_generator_ranks) / took_s


@dataclass(kw_only=True, slots=True)
class LimitSink:
    """Hands records on to other sinks, those of steps with `limit/`: 0 to 1."""

    limits: RunLimits
    sinks: Sequence[Sink]
    _published: float | None = field(init=False, default=None)
    """Version of the last step that told of a sync."""
    _said: set[str] = field(init=False, default_factory=set)

    def write(self, record: Record) -> None:
        if "time/step_s" in record:
            record = {**record, **self._shares(record)}
        for sink in self.sinks:
            sink.write(record)

    def _shares(self, record: Record) -> dict[str, float]:
        shares = self.limits.of_step(record)
        version = _value(record, "sync/version")
        if version == self._published:
            shares.pop("limit/sync", None)  # it is the one of an earlier step
        self._published = version
        for name, share in shares.items():
            if share > TOO_MUCH and name not in self._said:
                self._said.add(name)
                self._warn(name, share)
        return {name: min(1.0, share) for name, share in shares.items()}

    def _warn(self, name: str, share: float) -> None:
        of = self.limits.generator if name == "limit/decode" else self.limits.trainer
        where = f": remove {of.file} to have it measured again" if of.file else ""
        logger.warning(
            "%s is %.2f, more than what was measured of %s, which was busy then%s",
            name,
            share,
            of.device,
            where,
        )


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
