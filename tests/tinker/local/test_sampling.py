"""Whose turn it is among requests to samplers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from rl.tinker.local.base import Base
from rl.tinker.local.models import SamplerWeights
from rl.tinker.local.requests import Ask
from rl.tinker.local.sampling import Answer, GroupLimits, SampleQueue, next_group
from rl.tinker.messages import SampledSequence, SampleOutput
from rl.worker_thread import WorkerThread
from tests.tinker.local.local_parts import request

LIMITS = GroupLimits(max_sequences=8, max_prompt_tokens=100)


def weights() -> SamplerWeights:
    """Of a sampler of its own; nothing here looks into them."""
    return SamplerWeights(base=cast(Base, None), lora=None, trained={})


X, Y = weights(), weights()


def ask(of: SamplerWeights, number: int = 1, *, num_samples: int = 1, **how: Any) -> Ask:
    """Told apart by the prompt's first token."""
    return Ask(weights=of, request=request([number, 2, 3], num_samples=num_samples, **how))


def numbers(group: Sequence[Ask]) -> list[int]:
    return [int(one.request.prompt[0]) for one in group]


def test_the_oldest_request_goes_first_with_all_of_its_sampler():
    waiting = [ask(Y, 1), ask(X, 2), ask(Y, 3), ask(X, 4)]
    assert numbers(next_group(waiting, LIMITS)) == [1, 3]
    assert numbers(next_group(waiting[1:], LIMITS)) == [2, 4]


@pytest.mark.parametrize(
    ("how", "together"),
    [
        ({"temperature": 0.5}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.5}, False),
        ({"num_samples": 2}, False),
        ({"top_k": 0}, True),
        ({"seed": 8, "max_tokens": 2, "stop": (), "topk": 3}, True),
    ],
)
def test_requests_of_one_sampler_go_together_if_they_draw_alike(how, together):
    waiting = [ask(X, 1), ask(X, 2, **how), ask(X, 3)]
    assert numbers(next_group(waiting, LIMITS)) == ([1, 2, 3] if together else [1, 3])


def test_a_group_is_as_large_as_the_limits_and_at_least_one_request():
    waiting = [ask(X, n, num_samples=3) for n in range(5)]
    assert numbers(next_group(waiting, LIMITS)) == [0, 1]
    assert numbers(next_group(waiting, GroupLimits(max_sequences=8, max_prompt_tokens=5))) == [0]
    assert numbers(next_group(waiting, GroupLimits(max_sequences=1, max_prompt_tokens=1))) == [0]


def output(of: Ask) -> SampleOutput:
    tokens = of.request.prompt[:1]
    return SampleOutput(
        sequences=(SampledSequence(tokens=tokens, logprobs=np.zeros(1, np.float32), stop_reason="stop"),)
    )


class Answers:
    """Answers with the number of each request, one group at each `let_go`."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self._begun = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def __call__(self, group: Sequence[Ask]) -> list[SampleOutput]:
        self.groups.append(numbers(group))
        self._begun.release()
        assert self._gate.acquire(timeout=30)
        if any(number < 0 for number in numbers(group)):
            raise ArithmeticError("it cannot be computed")
        return [output(one) for one in group]

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=30)

    def let_go(self) -> None:
        self._gate.release()


@asynccontextmanager
async def queue(answers: Answer) -> AsyncIterator[SampleQueue]:
    thread = WorkerThread("sampler of a test")
    made = SampleQueue(answer=answers, thread=thread, limits=LIMITS, gather_s=0.0)
    try:
        yield made
    finally:
        made.close()
        assert await asyncio.to_thread(thread.stop, timeout_s=30)


async def number_of(future: asyncio.Task[SampleOutput]) -> int:
    return int((await asyncio.wait_for(future, 30)).sequences[0].tokens[0])


def submit(made: SampleQueue, *asks: Ask) -> list[asyncio.Task[SampleOutput]]:
    return [asyncio.create_task(made.sample(one)) for one in asks]


def test_no_sampler_starves_while_another_is_asked_again_and_again():
    async def main() -> None:
        answers = Answers()
        async with queue(answers) as made:
            tasks = submit(made, ask(X, 1))
            await answers.begun()
            tasks += submit(made, ask(Y, 2))
            for number in (3, 4, 5):
                tasks += submit(made, ask(X, number))
                await asyncio.sleep(0)
                answers.let_go()
                await answers.begun()
            answers.let_go()
            assert [await number_of(task) for task in tasks] == [1, 2, 3, 4, 5]
            # Y came second and was served second; what X was asked meanwhile went together, then the latest.
            assert answers.groups == [[1], [2], [3, 4], [5]]

    asyncio.run(main())


def test_a_request_that_is_cancelled_ends_alone():
    async def main() -> None:
        answers = Answers()
        async with queue(answers) as made:
            asks = [ask(X, n) for n in (1, 2, 3)]
            tasks = submit(made, *asks)
            await answers.begun()
            later = ask(X, 4)
            tasks += submit(made, later, ask(X, 5))
            await asyncio.sleep(0)
            tasks[1].cancel()
            tasks[3].cancel()
            await asyncio.wait([tasks[1], tasks[3]], timeout=30)
            assert [one.cancelled.is_set() for one in asks] == [False, True, False]
            assert later.cancelled.is_set()
            answers.let_go()
            answers.let_go()
            assert [await number_of(tasks[i]) for i in (0, 2, 4)] == [1, 3, 5]
            assert answers.groups == [[1, 2, 3], [5]]

    asyncio.run(main())


def test_an_error_fails_its_group_and_the_next_is_answered():
    async def main() -> None:
        answers = Answers()
        async with queue(answers) as made:
            wrong = submit(made, ask(X, 1), ask(X, -1))
            right = submit(made, ask(Y, 2))
            answers.let_go()
            answers.let_go()
            for task in wrong:
                with pytest.raises(ArithmeticError, match="cannot be computed"):
                    await asyncio.wait_for(task, 30)
            assert await number_of(right[0]) == 2

    asyncio.run(main())


def test_closing_fails_what_waits_and_what_is_being_answered():
    async def main() -> None:
        answers = Answers()
        async with queue(answers) as made:
            tasks = submit(made, ask(X, 1))
            await answers.begun()
            tasks += submit(made, ask(Y, 2))
            await asyncio.sleep(0)
            made.close()
            answers.let_go()
            for task in tasks:
                with pytest.raises(RuntimeError, match="the local backend was closed"):
                    await asyncio.wait_for(task, 30)
            with pytest.raises(RuntimeError, match="the local backend is closed"):
                await made.sample(ask(X, 3))
            assert answers.groups == [[1]]

    asyncio.run(main())
