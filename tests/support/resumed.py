"""Loops that are killed or stopped in virtual time, and go on from what they saved."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl.loop_state import ATTACHMENT, LoopState
from rl.stop_request import StopAskedError, StopRequest
from rl.types import LoopPosition, Problem
from tests.support.fakes import ListSink
from tests.support.loops import make_loop, number_of, problems
from tests.support.simulated import SimulatedPolicy
from tests.support.virtual_time import run_in_virtual_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint: of the learner its version, of the loop its state, as they were written."""

    version: int
    position: LoopPosition
    attachment: bytes

    @property
    def state(self) -> LoopState:
        state = pickle.loads(self.attachment)["state"]
        assert isinstance(state, LoopState)
        return replace(state, position=self.position)


@dataclass(kw_only=True)
class SavingPolicy(SimulatedPolicy):
    """Takes a while to save, and has saved only then."""

    save_s: float = 0.3
    checkpoints: list[Saved] = field(default_factory=list)

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        assert position is not None
        assert attachments is not None
        assert all(position.step != saved.position.step for saved in self.checkpoints), "saved twice"
        saved = Saved(version=self.version, position=position, attachment=attachments[ATTACHMENT])
        await asyncio.sleep(self.save_s)
        self.checkpoints.append(saved)


@dataclass(kw_only=True)
class Lineage:
    """One run, through any number of processes: what is left of them when it is finished."""

    make_policy: Callable[[], SavingPolicy]
    settings: dict[str, Any]
    make_problems: Callable[[], Iterator[Problem]] = problems
    sink: ListSink = field(default_factory=ListSink)
    saved: Saved | None = None
    trained: list[list[int]] = field(default_factory=list)
    """Problems of each step."""
    ages: list[int] = field(default_factory=list)
    """Of all tokens that any process trained on."""
    num_processes: int = 0

    @property
    def records(self) -> list[dict[str, float | None]]:
        """Without what depends on time."""
        return [without_times(record) for record in self.sink.records]

    def run(self, *, kill_at_s: float | None = None, stop_at_s: float | None = None) -> bool:
        """Go on in a new process, as far as that gets; whether it finished."""
        self.num_processes += 1
        policy, stop = self.make_policy(), StopRequest(say=lambda text: None)
        saved, first = self.saved, 0
        if saved is not None:
            policy.version, first = saved.version, saved.position.step
            del self.sink.records[saved.position.num_records :]
        else:
            self.sink.records.clear()
        del self.trained[first:]
        loop, _ = make_loop(
            policy, problems=self.make_problems(), sink=self.sink, stop=stop,
            state=None if saved is None else saved.state, last_saved=None if saved is None else first,
            **self.settings,
        )  # fmt: skip

        async def process() -> BaseException | None:
            running = asyncio.ensure_future(loop.run())
            if kill_at_s is not None:
                await asyncio.wait({running}, timeout=kill_at_s)
                running.cancel()
            if stop_at_s is not None:
                await asyncio.wait({running}, timeout=stop_at_s)
                stop.ask()
            return (await asyncio.gather(running, return_exceptions=True))[0]

        end, _ = run_in_virtual_time(process())
        self.trained += [_numbers(step) for step in policy.trained]
        self.ages += policy.age_of_tokens
        if policy.checkpoints:
            self.saved = policy.checkpoints[-1]
        if end is not None and not isinstance(end, asyncio.CancelledError | StopAskedError):
            raise end
        return end is None


def without_times(record: dict[str, float | None]) -> dict[str, float | None]:
    return {name: v for name, v in record.items() if not name.startswith(("time/", "perf/", "limit/"))}


def _numbers(step: list[Any]) -> list[int]:
    """Of its problems, in order."""
    prompts = [bytes(s.token_ids[~s.mask].tolist()).decode() for s in step]
    return list(dict.fromkeys(map(number_of, prompts)))
