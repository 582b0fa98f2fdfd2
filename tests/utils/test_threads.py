import asyncio
import queue
import threading
import time
import weakref

import pytest

from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.rubric import Criterion, Rubric
from rl.utils.background import BackgroundWriter
from rl.utils.errors import RunError
from rl.utils.threads import LoopThread, WorkerThread, gather_or_cancel, run_in_thread
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop

WAIT_S = 20.0


def test_run_aside_returns_the_result_or_raises_the_functions_error():
    def fail():
        raise TimeoutError("of its own")

    assert asyncio.run(run_in_thread(threading.get_ident, name="test")) != threading.get_ident()
    with pytest.raises(TimeoutError, match=r"^of its own$"):
        asyncio.run(run_in_thread(fail, name="test", limit_s=20.0))


def test_run_aside_stops_waiting_at_its_limit():
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"^removal: not done after 0\.05 s$"):
        asyncio.run(run_in_thread(gate.wait, name="removal", limit_s=0.05))
    gate.set()


def test_full_queue_refuses_and_stop_ends_the_thread_after_what_is_queued():
    gate = threading.Event()
    thread = WorkerThread("test", max_queued=1)
    first = thread.submit(gate.wait, WAIT_S)
    while not first.running():
        pass
    second = thread.submit(threading.get_ident)
    with pytest.raises(queue.Full):
        thread.submit(threading.get_ident)
    assert not thread.stop(timeout_s=0.0)
    gate.set()
    assert thread.stop(timeout_s=WAIT_S)
    assert second.result() != threading.get_ident()


def test_thread_that_waits_keeps_nothing_of_its_last_job():
    class Large:
        pass

    def measure(large):
        return [large]

    thread = WorkerThread("worker")
    large = Large()
    is_kept = weakref.ref(large)
    thread.submit(measure, large).result()
    del large
    deadline = time.monotonic() + 5.0
    while is_kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_kept() is None
    assert thread.stop(timeout_s=5.0)


def test_loop_thread_runs_coroutines_together_and_cancels_them():
    async def scenario():
        thread = LoopThread("test")
        ended: list[str] = []
        gate = asyncio.Event()

        async def wait():
            try:
                await gate.wait()
            finally:
                ended.append(threading.current_thread().name)

        async def open_gate():
            gate.set()

        first, second = thread.start(wait()), thread.start(wait())
        first.cancel()
        await asyncio.wait({first})
        await thread.start(open_gate())
        await second
        assert ended == ["test", "test"]

    asyncio.run(scenario())


def test_first_error_cancels_the_others_and_is_raised_as_it_is():
    ended: list[str] = []

    async def fail():
        await asyncio.sleep(0)
        raise KeyError("x") from ValueError("cause")

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waited for")

    with pytest.raises(KeyError) as caught:
        asyncio.run(gather_or_cancel([wait(), fail()]))
    assert ended == ["waited for"]
    assert isinstance(caught.value.__cause__, ValueError)


def test_timeout_around_calls_that_failed_before_is_still_a_timeout():
    async def fail():
        await asyncio.sleep(0)
        raise KeyError("x")

    async def scenario():
        async with asyncio.timeout(0.01):
            with pytest.raises(KeyError):
                await gather_or_cancel([fail()])
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


# Background writes


def test_write_error_is_raised_once_by_the_next_call(caplog):
    def fail():
        raise OSError("the disk is full")

    async def scenario():
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
    gate = threading.Event()
    order: list[object] = []

    async def scenario():
        writer = BackgroundWriter("test", close_s=0.05)
        await writer.begin(lambda: order.append(gate.wait(WAIT_S)))
        await writer.last(lambda: order.append("last"))
        await writer.close()

    asyncio.run(scenario())
    assert order == []
    assert [r.getMessage() for r in caplog.records] == [
        "test: not done after 0.05 s",
        "test: the last part of the run is not written",
    ]
    gate.set()


class GatedRecorder(Recorder):
    """Recorder that writes steps only once its gate is open."""

    def __init__(self, folder):
        super().__init__(folder / "rollouts.jsonl", config=RecorderConfig(num_eval_problems=1))
        self.gate = threading.Event()
        self.threads: set[int] = set()

    def step(self, *args):
        assert self.gate.wait(WAIT_S)
        self.threads.add(threading.get_ident())
        super().step(*args)

    @property
    def written(self):
        """Return step and kind of the rollouts in the file, without repetitions."""
        return list(
            dict.fromkeys((line["step"], line["kind"]) for line in read_rollouts(self.path))
        )


def test_loop_trains_while_rollouts_are_written(tmp_path, monkeypatch):
    policy, recorder = FakePolicy(reply=half_right), GatedRecorder(tmp_path)
    train = policy.forward_backward

    async def open_and_train(samples, **options):
        recorder.gate.set()
        return await train(samples, **options)

    monkeypatch.setattr(policy, "forward_backward", open_and_train)
    loop, _ = make_loop(policy, num_steps=3, eval_every=1)
    loop.recorder = recorder
    asyncio.run(loop.run())
    assert threading.get_ident() not in recorder.threads
    assert recorder.written == [
        (0, "eval"), *((step, kind) for step in (1, 2, 3) for kind in ("train", "eval"))
    ]  # fmt: skip


def test_rollouts_of_a_stopped_run_follow_earlier_writes(tmp_path, monkeypatch):
    recorder = GatedRecorder(tmp_path)

    def answer(rollout):
        if rollout.completion.policy_versions.max() >= 1:
            raise ValueError("no judge is there")
        return float("10" in rollout.text)

    rubric = Rubric(criteria=(Criterion(name="answer", function=answer),))
    loop, _ = make_loop(FakePolicy(reply=half_right), num_steps=2, rubric=rubric)
    loop.recorder = recorder
    close = loop._writer.close

    def open_and_close():
        recorder.gate.set()
        return close()

    monkeypatch.setattr(loop._writer, "close", open_and_close)
    with pytest.raises(RunError, match="no judge is there"):
        asyncio.run(loop.run())
    assert recorder.written == [(1, "train"), (2, "pending")]
