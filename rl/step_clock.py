"""Where the time of a step goes: what the loop waited for, and how long each kind of actor was busy."""

from __future__ import annotations

from collections import defaultdict

from rl.clock import now_s
from rl.observability.metrics import Mean
from rl.rollouts.group import RolloutWorker
from rl.rollouts.producer import Batch


class StepClock:
    """Seconds of one step at a time; `laps_s` together are the step."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._episodes = worker.episodes
        self._last = 0.0
        self._busy_at_start = (0.0, 0.0)
        self._reported = (0, 0.0)
        self.laps_s: dict[str, float] = {}

    def start(self) -> None:
        """A step begins."""
        self._last = now_s()
        self._busy_at_start = self._busy()
        self.laps_s = defaultdict(float)

    def lap(self, name: str, *, until: float | None = None) -> None:
        """What was since the lap before, or the start, was this; `until` now when None."""
        until = now_s() if until is None else max(until, self._last)
        self.laps_s[name] += until - self._last
        self._last = until

    def rollouts(self, batch: Batch) -> None:
        """The wait for a batch: as long as its last token was missing for generation, then for its scores."""
        self.lap("generate", until=min(now_s(), max(group.generated_at for group in batch.groups)))
        self.lap("score")

    def idle_s(self) -> dict[str, float]:
        """Of this step until now, by role."""
        step_s = sum(self.laps_s.values())
        generating, scoring = (
            now - before for now, before in zip(self._busy(), self._busy_at_start, strict=True)
        )
        return {
            "generator": max(0.0, step_s - generating),
            "reward": max(0.0, step_s - scoring),
            "trainer": step_s - self.laps_s["train"],
        }

    def generated_tokens_per_s(self) -> Mean:
        """Since this was asked last, while any completion was under way; of nothing if none was."""
        tokens, busy_s = self._episodes.num_generated_tokens, self._episodes.generating.total_s()
        tokens_before, busy_before_s = self._reported
        self._reported = tokens, busy_s
        return Mean(tokens - tokens_before, busy_s - busy_before_s)

    def _busy(self) -> tuple[float, float]:
        return self._episodes.generating.total_s(), self._worker.scoring.total_s()
