"""Meetings of a caller with the engine's loop; the tests of the engine have real ones."""

from __future__ import annotations

import asyncio

import pytest

from actors.vllm.pauses import Pause, PauseRequest, Pauses
from actors.vllm.requests import GeneratorError


async def use(request: PauseRequest, log: list[str]) -> None:
    async with request.use_engine():
        log.append("body begins")
        await asyncio.sleep(0)
        log.append("body ends")
    log.append("caller returns")


def test_caller_changes_the_engine_between_two_steps_of_the_loop():
    async def meet() -> list[str]:
        pauses = Pauses(asyncio.Event())
        log: list[str] = []
        request = pauses.add(Pause(version=8))
        caller = asyncio.create_task(use(request, log))
        await asyncio.sleep(0)
        log.append("last step")
        assert pauses.choose_next() is request
        assert await request.let_caller_change()
        log.append("all ranks agree")
        request.end(everywhere=True)
        await caller
        return log

    expected = ["last step", "body begins", "body ends", "all ranks agree", "caller returns"]
    assert asyncio.run(meet()) == expected


@pytest.mark.parametrize("num_ticks", range(4))
def test_loop_goes_on_whenever_the_caller_is_cancelled(num_ticks):
    """Before the pause, in the moment that it begins, in the body, and after the body."""

    async def meet() -> tuple[bool, list[str]]:
        pauses = Pauses(asyncio.Event())
        log: list[str] = []
        request = pauses.add(Pause(version=8))
        caller = asyncio.create_task(use(request, log))
        await asyncio.sleep(0)
        if num_ticks == 0:
            caller.cancel()
            await asyncio.sleep(0)
            assert pauses.choose_next() is None
        loop = asyncio.create_task(request.let_caller_change())
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        caller.cancel()
        succeeded = await asyncio.wait_for(loop, timeout=5.0)
        request.end(everywhere=succeeded)
        with pytest.raises(asyncio.CancelledError):
            await caller
        return succeeded, log

    succeeded, log = asyncio.run(meet())
    assert succeeded == ("body ends" in log)
    assert "caller returns" not in log


def test_failure_of_another_rank_and_of_the_loop_reach_the_caller():
    async def meet() -> None:
        pauses = Pauses(asyncio.Event())
        update, sleep = pauses.add(Pause(version=8)), pauses.add(Pause(asleep=True))
        callers = [asyncio.create_task(use(request, [])) for request in (update, sleep)]
        await asyncio.sleep(0)
        assert await update.let_caller_change()
        pauses.remove(update)
        update.end(everywhere=False)
        pauses.fail(GeneratorError("the engine failed"))
        with pytest.raises(GeneratorError, match="version 8 failed on another rank"):
            await callers[0]
        with pytest.raises(GeneratorError, match="the engine failed"):
            await callers[1]

    asyncio.run(meet())
