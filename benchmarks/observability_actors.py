"""Actors whose observation can be switched between steps, for `benchmarks.observability`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.observability import activity
from rl.observability.activity import Activity

SIDES = ("off", "timeline", "all", "control")
"""control: off once more, which tells how far apart two equal sides are."""


class Nobody:
    """Is told what begins and ends, and does nothing."""

    def begin(self, name: str, version: int | None) -> int:
        return 0

    def end(self, name: str, number: int, error: BaseException | None = None) -> None:
        """Nothing."""


class Switch:
    """Stands in the place of a process's `Activity`; what has begun ends where it began."""

    def __init__(self, watched: Activity) -> None:
        """`watched` tells what it does, and keeps spans."""
        with_spans = Activity()
        with_spans.keep_spans(watched._spans)
        self._of: dict[str, Any] = {"all": watched, "timeline": with_spans}
        self._now: Any = watched

    def turn(self, side: str) -> None:
        self._now = self._of.get(side, Nobody())

    def begin(self, name: str, version: int | None) -> tuple[Any, int]:
        return self._now, self._now.begin(name, version)

    def end(self, name: str, number: tuple[Any, int], error: BaseException | None = None) -> None:
        activity, own = number
        activity.end(name, own, error)


def observe(side: str) -> None:
    """From now on this process is observed as the side asks for."""
    if not isinstance(activity.THIS_PROCESS, Switch):
        activity.THIS_PROCESS = Switch(activity.THIS_PROCESS)  # type: ignore[assignment]
    switch: Any = activity.THIS_PROCESS
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
