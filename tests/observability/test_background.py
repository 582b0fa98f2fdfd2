import asyncio
import threading
from typing import Any, ClassVar

import pytest

from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import is_correct
from rl.types import Rollout
from rl.utils.errors import RunError
from rl.utils.threads import BackgroundWriter
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop

WAIT_S = 20.0


def test_write_error_is_raised_once_by_the_next_call(caplog):
    def fail() -> None:
        raise OSError("the disk is full")

    async def scenario() -> None:
        writer = BackgroundWriter("test")
        await writer.begin(fail)
        with pytest.raises(OSError, match="the disk is full"):
            await writer.begin(fail)
        await writer.finish()
        await writer.begin(fail)
        await writer.close()  # as before, the second error is logged and does not hide the first

    asyncio.run(scenario())
    assert [r.getMessage() for r in caplog.records] == ["test: OSError('the disk is full')"]


def test_last_write_is_skipped_while_the_thread_writes(caplog):
    gate, order = threading.Event(), []

    def slow() -> None:
        assert gate.wait(WAIT_S)
        order.append("slow")

    async def scenario() -> None:
        writer = BackgroundWriter("test", close_s=0.05)
        await writer.begin(slow)
        await writer.last(lambda: order.append("last"))
        await writer.close()

    asyncio.run(scenario())
    assert order == []
    assert [r.getMessage() for r in caplog.records] == [
        "test: not done after 0.05 s",
        "test: the last part of the run is not written",
    ]
    gate.set()


class Gated(Recorder):
    """Recorder that writes a step only on command."""

    gate = threading.Event()
    threads: ClassVar[set[int]] = set()

    def step(self, *args: Any) -> None:
        assert self.gate.wait(WAIT_S)
        self.threads.add(threading.get_ident())
        super().step(*args)


class Opening(FakePolicy):
    """Trainer that lets the recorder write once the gradient is computed."""

    async def forward_backward(self, samples, **options):
        Gated.gate.set()
        return await super().forward_backward(samples, **options)


def test_loop_trains_while_rollouts_are_written(tmp_path):
    recorder = Gated(tmp_path / "rollouts.jsonl", config=RecorderConfig(num_eval_problems=1))
    loop, _ = make_loop(Opening(reply=half_right), num_steps=3, eval_every=1)
    loop.recorder = recorder
    asyncio.run(loop.run())
    assert threading.get_ident() not in Gated.threads
    said = [(line["step"], line["kind"]) for line in read_rollouts(recorder.path)]
    in_order = [(0, "eval"), *((step, kind) for step in (1, 2, 3) for kind in ("train", "eval"))]
    assert list(dict.fromkeys(said)) == in_order


def fails_from(step: int) -> Rubric:
    """Return a reward function that fails for policy version `step` - 1 and later."""

    def answer(rollout: Rollout) -> float:
        if rollout.completion.policy_versions.max() >= step - 1:
            raise ValueError("no judge is there")
        return float(is_correct(rollout))

    return Rubric(criteria=(Criterion(name="answer", function=answer),), correct=is_correct)


class Held(BackgroundWriter):
    """Background writer that lets the recorder write once it is closed."""

    async def close(self) -> bool:
        Gated.gate.set()
        return await super().close()


def test_rollouts_of_a_stopped_run_follow_earlier_writes(tmp_path):
    recorder = Gated(tmp_path / "rollouts.jsonl", config=RecorderConfig())
    Gated.gate.clear()
    loop, _ = make_loop(FakePolicy(reply=half_right), num_steps=2, rubric=fails_from(2))
    loop.recorder, loop._writer = recorder, Held("rollouts.jsonl")
    with pytest.raises(RunError, match="no judge is there"):
        asyncio.run(loop.run())
    said = [(line["step"], line["kind"]) for line in read_rollouts(recorder.path)]
    assert list(dict.fromkeys(said))[-2:] == [(1, "train"), (2, "pending")]
