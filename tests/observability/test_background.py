import asyncio
import threading
from functools import partial
from typing import Any, ClassVar

import pytest

from rl.errors import RunError
from rl.observability.background import BackgroundWriter
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import is_correct
from rl.types import Rollout
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop

WAIT_S = 20.0


def test_the_event_loop_goes_on_while_something_is_written_and_the_next_waits_for_it():
    gate, order = threading.Event(), []

    def write(name: str) -> None:
        assert gate.wait(WAIT_S)
        order.append(name)

    async def scenario() -> None:
        writer = BackgroundWriter("test")
        await writer.begin(partial(write, "first"))
        second = asyncio.ensure_future(writer.begin(partial(write, "second")))
        await asyncio.sleep(0)
        assert order == []
        assert not second.done()
        gate.set()
        await second
        await writer.finish()
        assert order == ["first", "second"]
        await writer.close()

    asyncio.run(scenario())


def test_what_could_not_be_written_is_raised_once_by_whoever_comes_next(caplog):
    def fail() -> None:
        raise OSError("the disk is full")

    async def scenario() -> None:
        writer = BackgroundWriter("test")
        await writer.begin(fail)
        with pytest.raises(OSError, match="the disk is full"):
            await writer.begin(fail)
        await writer.finish()
        await writer.begin(fail)
        await writer.close()  # as after another error: it is said, and does not hide that one

    asyncio.run(scenario())
    assert [r.getMessage() for r in caplog.records] == ["test: OSError('the disk is full')"]


def test_the_last_is_written_after_what_is_under_way_and_its_own_error_is_logged(caplog):
    gate, order = threading.Event(), []

    def write(name: str) -> None:
        assert gate.wait(WAIT_S)
        order.append(name)

    def fail() -> None:
        order.append("fail")
        raise OSError("the disk is full")

    async def scenario() -> None:
        writer = BackgroundWriter("test")
        await writer.begin(partial(write, "first"))
        last = asyncio.ensure_future(writer.last(fail))
        await asyncio.sleep(0)
        assert order == []
        gate.set()
        await last
        await writer.close()

    asyncio.run(scenario())
    assert order == ["first", "fail"]
    assert [r.getMessage() for r in caplog.records] == ["test: OSError('the disk is full')"]


def test_the_last_is_left_out_where_the_thread_is_still_writing(caplog):
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
        "test: what the run had when it stopped is not written",
    ]
    gate.set()


class Gated(Recorder):
    """Writes a step only when told to."""

    gate = threading.Event()
    threads: ClassVar[set[int]] = set()

    def step(self, *args: Any) -> None:
        assert self.gate.wait(WAIT_S)
        self.threads.add(threading.get_ident())
        super().step(*args)


class Opening(FakePolicy):
    """Lets the recorder write once the gradient is asked for."""

    async def forward_backward(self, samples, **options):
        Gated.gate.set()
        return await super().forward_backward(samples, **options)


def test_a_loop_trains_while_its_rollouts_are_written_and_ends_when_all_are(tmp_path):
    recorder = Gated(tmp_path / "rollouts.jsonl", config=RecorderConfig(num_eval_problems=1))
    loop, _ = make_loop(Opening(reply=half_right), num_steps=3, eval_every=1)
    loop.recorder = recorder
    num_threads = threading.active_count()
    asyncio.run(loop.run())
    assert threading.get_ident() not in Gated.threads
    said = [(line["step"], line["kind"]) for line in read_rollouts(recorder.path)]
    in_order = [(0, "eval"), *((step, kind) for step in (1, 2, 3) for kind in ("train", "eval"))]
    assert list(dict.fromkeys(said)) == in_order
    assert threading.active_count() == num_threads


class BrokenRecorder(Recorder):
    def step(self, step, batch, advantages_PG):
        raise KeyError(f"of step {step}")


def test_a_recorder_that_is_broken_stops_the_run_and_one_without_a_disk_does_not(tmp_path):
    broken = BrokenRecorder(tmp_path / "rollouts.jsonl", config=RecorderConfig())
    loop, _ = make_loop(FakePolicy(reply=half_right))
    loop.recorder = broken
    with pytest.raises(KeyError, match="of step 1"):
        asyncio.run(loop.run())
    loop, sink = make_loop(FakePolicy(reply=half_right))
    loop.recorder = Recorder(tmp_path / "missing" / "rollouts.jsonl", config=RecorderConfig())
    asyncio.run(loop.run())
    assert [record["step"] for record in sink.records] == [1]


def fails_from(step: int) -> Rubric:
    """All rewards fail that are of policy version `step` - 1 or later."""

    def answer(rollout: Rollout) -> float:
        if rollout.completion.policy_versions.max() >= step - 1:
            raise ValueError("no judge is there")
        return float(is_correct(rollout))

    return Rubric(criteria=(Criterion(name="answer", function=answer),), correct=is_correct)


class Held(BackgroundWriter):
    """Lets the recorder write its steps once somebody waits for the last of it."""

    async def close(self) -> bool:
        Gated.gate.set()
        return await super().close()


@pytest.mark.parametrize(("eval_every", "last"), [(0, (2, "pending")), (1, (1, "eval"))])
def test_what_stopped_a_run_is_written_after_what_is_still_being_written(tmp_path, eval_every, last):
    recorder = Gated(tmp_path / "rollouts.jsonl", config=RecorderConfig())
    Gated.gate.clear()
    loop, _ = make_loop(
        FakePolicy(reply=half_right), num_steps=2, eval_every=eval_every, rubric=fails_from(2)
    )
    loop.recorder, loop._recording = recorder, Held("rollouts.jsonl")
    with pytest.raises(RunError, match="no judge is there"):
        asyncio.run(loop.run())
    said = [(line["step"], line["kind"]) for line in read_rollouts(recorder.path)]
    assert list(dict.fromkeys(said))[-2:] == [(1, "train"), last]


@pytest.mark.parametrize("eval_every", [0, 1])
def test_a_recorder_that_cannot_write_what_stopped_a_run_does_not_hide_why_it_stopped(
    tmp_path, caplog, eval_every
):
    recorder = Recorder(tmp_path / "missing" / "rollouts.jsonl", config=RecorderConfig())
    loop, _ = make_loop(FakePolicy(reply=half_right), eval_every=eval_every, rubric=fails_from(1))
    loop.recorder = recorder
    with pytest.raises(RunError, match="no judge is there"):
        asyncio.run(loop.run())
    assert "rollouts.jsonl was not written: No such file or directory" in caplog.text
