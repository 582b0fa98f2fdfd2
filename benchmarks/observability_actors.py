"""Actors whose observation can be switched between steps, for `benchmarks.observability`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.observability import spans
from rl.observability.spans import SpanRecorder

SIDES = ("off", "timeline", "all", "control")
"""Sides of the comparison; "control" is "off" again and shows the noise between equal sides."""


class Nobody:
    """Span recorder that records nothing."""

    def begin(self, name: str, version: int | None) -> int:
        return 0

    def end(self, name: str, number: int, error: BaseException | None = None) -> None:
        pass


class Switch:
    """Span recorder that forwards to the recorder of the current side; a span ends where it began."""

    def __init__(self, watched: SpanRecorder) -> None:
        """`watched` is the recorder with everything on."""
        with_spans = SpanRecorder(log=watched.log)
        self._of: dict[str, Any] = {"all": watched, "timeline": with_spans}
        self._now: Any = watched

    def turn(self, side: str) -> None:
        self._now = self._of.get(side, Nobody())

    def begin(self, name: str, version: int | None) -> tuple[Any, int]:
        return self._now, self._now.begin(name, version)

    def end(self, name: str, number: tuple[Any, int], error: BaseException | None = None) -> None:
        recorder, own = number
        recorder.end(name, own, error)


def observe(side: str) -> None:
    """Observe this process as the side requires from now on."""
    if not isinstance(spans.RECORDER, Switch):
        spans.RECORDER = Switch(spans.RECORDER)  # type: ignore[assignment]
    switch: Any = spans.RECORDER
    switch.turn(side)


class ObservedTrainer(PolicyTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        pass

    @concurrent_endpoint
    async def observe(self, side: str) -> None:
        observe(side)


class ObservedGenerator(VLLMGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        pass

    @concurrent_endpoint
    async def observe(self, side: str) -> None:
        observe(side)


class ObservedReward(RewardActor):
    @dataclass(kw_only=True, slots=True)
    class Config(RewardActor.Config):
        pass

    @concurrent_endpoint
    async def observe(self, side: str) -> None:
        observe(side)
