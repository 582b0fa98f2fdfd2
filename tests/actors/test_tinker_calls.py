"""Calls to a trainer come one after another, to their end, and a lost trainer is everybody's error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import ActorError

from actors.calls import ActorCallError, ActorTimeoutError
from actors.tinker_calls import BackendLostError, TrainerCalls
from rl.tinker.errors import InvalidRequestError
from tests.actors.test_tinker_samplers import in_loop, settled


def calls_of(answers: dict[str, Any], *, num_ranks: int = 1) -> TrainerCalls:
    """Of a trainer whose endpoints answer, or raise, what is given."""

    async def call(endpoint: str, *args: Any, limit: str) -> list[Any]:
        if isinstance(answers[endpoint], BaseException):
            raise answers[endpoint]
        return answers[endpoint]

    return TrainerCalls(SimpleNamespace(call=call), num_ranks=num_ranks)  # type: ignore[arg-type]


def remote(error: Exception) -> ActorCallError:
    """What comes of an endpoint that raised."""
    failed = ActorCallError("trainer.optim_step failed")
    failed.__cause__ = ActorError(error)
    return failed


@in_loop
async def test_what_has_begun_goes_on_without_its_caller_and_before_the_next():
    calls, log, go_on = calls_of({}), [], asyncio.Event()

    async def first() -> str:
        log.append("first begins")
        await go_on.wait()
        log.append("first ends")
        return "a snapshot"

    async def undo(result: str) -> None:
        log.append(f"nobody wants {result}")

    async def other(name: str) -> str:
        log.append(name)
        return name

    cancelled = asyncio.create_task(calls.alone(first, undo=undo))
    second = asyncio.create_task(calls.alone(lambda: other("second")))
    never = asyncio.create_task(calls.alone(lambda: other("never")))
    third = asyncio.create_task(calls.alone(lambda: other("third")))
    await settled()
    cancelled.cancel()
    never.cancel()
    await settled()
    assert log == ["first begins"]
    go_on.set()
    assert [*await asyncio.gather(second, third)] == ["second", "third"]
    assert log == ["first begins", "first ends", "nobody wants a snapshot", "second", "third"]


@in_loop
async def test_a_refusal_of_any_rank_is_raised_and_the_trainer_goes_on():
    refused = InvalidRequestError("the loss is not finite")
    calls = calls_of({"forward": [None, refused], "step": ["done", "done"]}, num_ranks=2)
    with pytest.raises(InvalidRequestError, match="the loss is not finite"):
        await calls.alone(lambda: calls.call("forward", limit="train_s"))
    assert await calls.alone(lambda: calls.call("step", limit="train_s")) == ["done", "done"]


@pytest.mark.parametrize(
    ("error", "num_ranks", "is_lost"),
    [
        (ActorCallError("rank 0 of 1 is dead"), 1, True),
        (ActorTimeoutError("no answer within 1 s"), 1, True),
        (remote(RuntimeError("out of memory")), 1, False),
        # The other rank may be in the middle of it.
        (remote(RuntimeError("out of memory")), 2, True),
    ],
    ids=["dead", "late", "raised alone", "raised on one of two"],
)
def test_a_trainer_that_is_gone_or_out_of_step_is_lost(error, num_ranks, is_lost):
    @in_loop
    async def life() -> None:
        calls = calls_of({"step": error, "forward": ["fine"] * num_ranks}, num_ranks=num_ranks)
        step = asyncio.create_task(calls.alone(lambda: calls.call("step", limit="train_s")))
        forward = asyncio.create_task(calls.alone(lambda: calls.call("forward", limit="train_s")))
        ends = await asyncio.gather(step, forward, return_exceptions=True)
        if is_lost:
            assert [type(end) for end in ends] == [BackendLostError, BackendLostError]
            assert str(error) in str(ends[1])
        else:
            assert ends[0] is error
            assert ends[1] == ["fine"]

    life()


@in_loop
async def test_an_end_reaches_who_is_in_the_middle_and_who_comes_later():
    calls = calls_of({})
    stuck = asyncio.create_task(calls.alone(asyncio.Event().wait))
    await settled()
    calls.end(RuntimeError("the backend was closed"))
    with pytest.raises(RuntimeError, match="closed"):
        await stuck
    late = asyncio.create_task(calls.alone(asyncio.Event().wait))
    with pytest.raises(RuntimeError, match="closed"):
        await late
